"""The one package that knows vLLM. README.md lists every symbol of it that is relied on."""
