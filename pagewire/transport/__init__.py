"""What every service does around its calls, whatever these say: TLS, listening, dialling, health, signals and draining.

Nothing here knows a word of the domain, or imports anything else of ours.
"""
