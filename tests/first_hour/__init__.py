"""Behaviour of a fresh installation on unusual machines, one state after another: `python -m tests.first_hour [WORD
...]`.

A state fails if it ends in a traceback, hangs, returns another exit code, or lacks the words that say what to do.
"""
