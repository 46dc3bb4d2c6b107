"""Transport of every service: TLS, listening, dialling, health checks.

This package does not depend on the contents of messages.
"""
