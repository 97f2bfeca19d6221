INSERT INTO model_versions (model, version, manifest, num_bytes, source, created_at)
VALUES (%(model)s, %(version)s, %(manifest)s, %(num_bytes)s, %(source)s, %(created_at)s)
ON CONFLICT (model, version) DO NOTHING
RETURNING version
