"""Everything around services that run on this machine: finding the model, starting processes and watching them, logs.

Services know nothing of this package; the command and `LLM` put it around them. Its modules are imported one by one,
since each process needs few of them: a client's `LocalServer`, for instance, nothing of models.
"""
