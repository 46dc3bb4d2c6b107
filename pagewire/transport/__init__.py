"""The work of every service around its calls, whatever these say: TLS, listening, dialling, health, signals, draining.

Nothing here knows a word of the domain, or imports anything else of ours.
"""
