SELECT model, version, manifest, num_bytes, source, created_at
FROM model_versions
ORDER BY model, arrival DESC
