"""Adapters between hipforge and the packages that use it: one module or package per other project.

None of them is imported by ``import hipforge``, and none imports the other project before it is used for it.
"""
