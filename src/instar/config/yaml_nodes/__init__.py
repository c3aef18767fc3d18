"""Nodes of YAML 1.2: of simple texts by libyaml, of any text by ruamel.yaml, which also knows what is wrong with it."""
