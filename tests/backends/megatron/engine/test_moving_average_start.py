"""The frozen copy of a model's weights: to the bit, whatever their dtypes, sizes and storages."""

import torch

from dagrl.backends.megatron.engine.moving_average import StartWeights

MIB = 2**20


class Model(torch.nn.Module):
    """Tensors of less than an alignment, of none, and of more than a chunk of host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.randn(17 * MIB))
        self.small = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
        self.register_buffer("scalar", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)


def contents(model: Model) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_they_come_and_go_to_the_bit_though_parameters_move() -> None:
    model = Model()
    start = contents(model)
    kept = StartWeights([model])
    # As Megatron's wrapper does, whose buffer holds all parameters.
    buffer = torch.zeros(20 * MIB)
    model.large.data = buffer[MIB : 18 * MIB].copy_(model.large.data)
    with torch.no_grad():
        model.large.mul_(2.0)
        model.small.add_(1.0)
    model.scalar += 1
    model.mask.logical_not_()
    own = contents(model)
    for _ in range(2):
        with kept.in_place():
            assert same(contents(model), start)
            assert torch.equal(buffer[MIB : 18 * MIB], start[0])
        assert same(contents(model), own)
    assert torch.equal(buffer[MIB : 18 * MIB], own[0])


def test_host_memory_is_taken_for_all_together() -> None:
    model = torch.nn.ParameterList([torch.randn(5 * MIB) for _ in range(6)])
    # 6 x 20 MiB, which would be 6 x 32 if each were pinned by itself.
    assert StartWeights([model])._aside.nbytes == 128 * MIB
