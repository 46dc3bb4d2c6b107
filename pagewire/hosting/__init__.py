"""The environment of services on this machine: model lookup and download, process supervision, and logging.

The services do not depend on this package. The command and `LLM` use it to run them. Other packages import its modules
one by one, since each process needs only a few of them.
"""
