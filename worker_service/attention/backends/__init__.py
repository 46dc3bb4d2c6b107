"""The attention backends. Each is a module of the backend's name with a function `create`.

A backend is imported only when it is selected: some backends take long to import or need packages that are not
installed. `worker_service.config.ATTENTION_BACKENDS` lists the names and the packages that each backend needs.
"""
