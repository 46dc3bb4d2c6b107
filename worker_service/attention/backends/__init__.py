"""The attention backends, each in the module of its name: `create` makes it of what it is to compute.

A module is imported where it computes and nowhere else: some take long to import, or need what is not installed. The
names, and what each needs, are `worker_service.config.ATTENTION_BACKENDS`.
"""
