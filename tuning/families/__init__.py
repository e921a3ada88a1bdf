"""The tuners of the op families, one module or package for each, named like the family's in ``ops``."""
