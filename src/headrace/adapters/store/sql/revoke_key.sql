UPDATE api_keys SET revoked = true WHERE key_id = %(key_id)s RETURNING key_id
