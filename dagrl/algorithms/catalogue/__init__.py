"""All formulas by the names of the pipeline file: ``python -m dagrl.algorithms.catalogue > docs/algorithms.md``.

Where a formula comes from stands in its function's docstring; a test holds this catalogue against those, against the
schema, the templates and the tests that it names.
"""
