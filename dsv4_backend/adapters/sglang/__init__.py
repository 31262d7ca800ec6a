"""SGLang with our metadata and plans: what its plugin loader calls, and the parts that it is made of.

Importing this imports no SGLang. docs/sglang.md says how to install, switch and check it.
"""

from dsv4_backend.adapters.sglang.plugin import register

__all__ = ["register"]
