"""The work of every service around its calls, whatever these say: TLS, listening, dialling, health.

Nothing here knows a word of the domain.
"""
