SELECT model, version, manifest, num_bytes, source, created_at
FROM model_versions
WHERE model = %(model)s AND version = %(version)s
