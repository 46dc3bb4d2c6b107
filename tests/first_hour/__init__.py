"""What a newcomer meets on an unusual machine, one state after the other: `python -m tests.first_hour [WORD ...]`.

No state may end in a traceback, hang, give another exit code, or lack the words that tell what to do.
"""
