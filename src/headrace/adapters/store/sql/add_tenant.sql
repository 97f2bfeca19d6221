INSERT INTO tenants (tenant_id, name) VALUES (%(tenant_id)s, %(name)s) ON CONFLICT DO NOTHING
