SELECT key_id, tenant_id, role, secret_sha256, created_at, revoked
FROM api_keys
WHERE key_id = %(key_id)s
