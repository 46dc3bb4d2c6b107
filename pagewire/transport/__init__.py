"""What every service does around its calls, whatever these say: TLS, listening and dialling.

Nothing here knows a word of the domain, or imports anything else of ours; the services import nothing else of pagewire.
"""
