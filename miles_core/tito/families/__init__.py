"""Model families that ship with the core: one module a family, shared tool-call formats beside them."""
