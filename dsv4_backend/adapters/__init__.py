"""One module or folder an engine: the only code that knows, and late imports, an engine."""
