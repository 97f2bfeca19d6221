SELECT model, version, manifest, num_bytes, source, created_at
FROM model_versions
WHERE model = %(model)s
ORDER BY arrival DESC
LIMIT 1
