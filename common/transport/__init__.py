"""The work of every service around its calls, whatever these say: TLS, listening, dialling, health, draining.

Nothing here knows a word of the domain.
"""
