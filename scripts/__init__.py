"""The commands of a checkout: each launcher beside this file runs a module of a package below."""
