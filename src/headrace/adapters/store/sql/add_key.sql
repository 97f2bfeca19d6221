INSERT INTO api_keys (key_id, tenant_id, role, secret_sha256, created_at, revoked)
VALUES (%(key_id)s, %(tenant_id)s, %(role)s, %(secret_sha256)s, %(created_at)s, %(revoked)s)
