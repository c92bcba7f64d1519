"""What SGLang is told: the file's own fields, what follows from its other sections, and defaults for the devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang.args import ADAPTER_LOADER, WEIGHT_LOADER, server_arguments
from dagrl.backends.sglang.layout import KEPT_BACK
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema.engine import SentAdapter


def told(
    *,
    server=None,
    quantization=None,
    extra=None,
    gpus=("0",),
    seed=1,
    sleeps=False,
    node=0,
    nodes=1,
    index=0,
    weights_from="actor",
    adapter=None,
):
    spec = SglangEngineSpec(
        backend="sglang",
        group="rollout",
        weights_from=weights_from,
        quantization=quantization,
        server=server or {},
        extra={"server": extra or {}},
    )
    ranks = RankContext(0, 1, "10.0.0.1", 4000, 60, seed)
    name = f"generator/{index}"
    share = ServerShare(name, index, node, nodes, tuple(gpus), ranks, Path("logs"), 60, sleeps, adapter)
    return server_arguments(spec, share, Path("model"), positions=64)


def test_tokens_go_in_and_out_by_their_ids_and_weights_by_our_loader():
    arguments = told()
    assert arguments["skip_tokenizer_init"] is True and arguments["model_path"] == "model"
    assert arguments["custom_weight_loader"] == [WEIGHT_LOADER, ADAPTER_LOADER]


def test_weights_that_come_from_another_engine_are_not_read():
    assert told()["load_format"] == "dummy"
    assert told(extra={"load_format": "auto"})["load_format"] == "dummy"
    assert told(weights_from=None)["load_format"] == "auto"
    assert told(weights_from=None, extra={"load_format": "presharded"})["load_format"] == "presharded"


def test_a_cache_in_fp8_has_larger_pages():
    in_fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    assert told(server=in_fp8, quantization="fp8")["page_size"] == 64
    assert told(server=in_fp8 | {"page_size": 16}, quantization="fp8")["page_size"] == 16
    # Models that cannot have pages may have such a cache.
    assert "page_size" not in told(server=in_fp8) and "page_size" not in told(quantization="fp8")


def test_a_server_that_takes_adapters_reads_and_keeps_the_models_weights():
    arguments = told(adapter=SentAdapter(16, 32.0), sleeps=True)
    assert arguments["load_format"] == "auto" and arguments["enable_weights_cpu_backup"] is True
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
    assert "lora_backend" not in arguments
    assert told(adapter=SentAdapter(16, 32.0), gpus=())["lora_backend"] == "torch_native"
    assert "enable_lora" not in told()


def test_responses_may_use_all_of_a_context():
    assert told()["context_length"] == 64 + KEPT_BACK
    assert told(server={"context_length": 32})["context_length"] == 32 + KEPT_BACK


def test_the_file_has_its_way_with_defaults():
    on_gpu = told()
    assert (on_gpu["dtype"], on_gpu["cuda_graph_backend_prefill"], on_gpu["device"]) == ("bfloat16", "disabled", "cuda")
    assert "attention_backend" not in on_gpu, "SGLang knows which suits the GPU"
    on_cpu = told(gpus=())
    assert (on_cpu["dtype"], on_cpu["attention_backend"], on_cpu["device"]) == ("float32", "torch_native", "cpu")
    assert (on_gpu["sampling_backend"], on_cpu["sampling_backend"]) == ("fused", "pytorch")
    assert told(server={"sampling_backend": "flashinfer"})["sampling_backend"] == "flashinfer"
    assert told(server={"dtype": "float16", "log_level": "info"})["dtype"] == "float16"
    assert told(gpus=(), server={"max_total_tokens": 99})["max_total_tokens"] == 99


@pytest.mark.parametrize(
    ("server", "largest"),
    [
        ({}, 512),
        ({"max_running_requests": 64}, 64),
        ({"max_running_requests": 2048}, 512),
        ({"cuda_graph_max_bs_decode": 16}, 16),
        ({"cuda_graph_bs_decode": [1, 2]}, None),
    ],
)
def test_decoding_is_captured_for_all_requests_that_run(server, largest):
    assert told(server=server).get("cuda_graph_max_bs_decode") == largest


def test_servers_draw_apart_and_the_same_in_each_run():
    seeds = {told(index=index, seed=seed)["random_seed"] for index in range(8) for seed in (-1, 0, 1, 2**62)}
    assert len(seeds) == 32 and all(0 <= seed < 2**31 for seed in seeds)
    assert told(seed=3)["random_seed"] == told(seed=3)["random_seed"]


def test_memory_is_saved_for_those_that_sleep():
    assert (told()["enable_memory_saver"], told()["enable_weights_cpu_backup"]) == (False, False)
    asleep = told(sleeps=True)
    assert (asleep["enable_memory_saver"], asleep["enable_weights_cpu_backup"]) == (True, False)
    assert told(sleeps=True, weights_from=None)["enable_weights_cpu_backup"], "nobody sends them again"
    assert not told(sleeps=True, gpus=())["enable_memory_saver"]
    assert asleep["mem_fraction_static"] == 0.8 and "mem_fraction_static" not in told()
    assert told(sleeps=True, server={"mem_fraction_static": 0.6})["mem_fraction_static"] == 0.6


def test_processes_of_a_machine_meet_at_a_port_and_those_of_several_at_an_address():
    alone = told()
    assert alone["nccl_port"] == 4000 and "dist_init_addr" not in alone
    second = told(node=1, nodes=2)
    assert (second["dist_init_addr"], second["nnodes"], second["node_rank"]) == ("10.0.0.1:4000", 2, 1)
    spread = told(server={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True})
    assert spread["dist_init_addr"] == "10.0.0.1:4000"


def test_untested_fields_are_passed_on_but_not_over_those_that_dagrl_sets():
    arguments = told(extra={"schedule_policy": "fcfs", "model_path": "other"})
    assert (arguments["schedule_policy"], arguments["model_path"]) == ("fcfs", "model")
