"""Front ends, scripted schedulers, tenants, certificates and clients, for tests of services."""
