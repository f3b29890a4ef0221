"""The cluster as data: models, stages, groups of instances, policies and services, read from a TOML file.

`services/supervisor/layout.py` renders a ClusterSpec to processes, `compose/prepare.py` to containers.
"""
