-- Who may call, and what can be served.

CREATE TABLE tenants (
    tenant_id text PRIMARY KEY,
    name text NOT NULL
);

CREATE TABLE api_keys (
    key_id text PRIMARY KEY,
    tenant_id text NOT NULL REFERENCES tenants,
    role text NOT NULL,
    secret_sha256 bytea NOT NULL,
    created_at double precision NOT NULL, -- Unix seconds, as the writer gave them
    revoked boolean NOT NULL DEFAULT false
);

-- Rows are written once and never change. "Newest" is the order in which they arrived here, not the writers' clocks.
CREATE TABLE model_versions (
    model text COLLATE "C" NOT NULL,
    version text NOT NULL,
    manifest text NOT NULL,
    num_bytes bigint NOT NULL,
    source text NOT NULL,
    created_at double precision NOT NULL,
    arrival bigint GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (model, version)
);

CREATE UNIQUE INDEX model_versions_by_arrival ON model_versions (model, arrival DESC);
