"""Plain torch, slow and obvious: the home of the semantics. `impl="torch"` runs it; no kernel imports it."""
