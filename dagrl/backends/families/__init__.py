"""Model families, one module each: the shape of a model, its tensors, and the properties from which a backend builds
it.

`base.Family` is the contract, `registry` finds families, and `parts` holds the layers that families are composed of.
Importing this package imports no torch: `dagrl validate` uses it.
"""
