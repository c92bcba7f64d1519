"""The shape of a model, by the name that the plan knows it by; see `dagrl.spec.model_shape`."""

from dagrl.spec.model_shape import ExpertShape, LatentShape, LayerParameters, ModelShape, model_shape, shape_of

__all__ = ["ExpertShape", "LatentShape", "LayerParameters", "ModelShape", "model_shape", "shape_of"]
