"""The approximations q: immutable pytrees of parameters, each with its own geometry."""
