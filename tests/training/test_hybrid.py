"""A run of Qwen3.5's hybrid of Gated DeltaNet and attention, from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.cli import main
from logra_jax.models.attention import Span
from logra_jax.models.hf import load_decoder
from logra_jax.training.config import load_config
from logra_jax.training.journal import read_metrics
from logra_jax.training.loop import train
from logra_jax.training.serve import serve_options


@pytest.mark.slow
def test_a_hybrid_is_trained_sampled_replayed_and_exported(
    tiny_run, hybrid_dir, tmp_path, capsys
):
    from transformers import AutoModelForCausalLM

    run = tiny_run(
        "run",
        f"model.path={hybrid_dir}",
        "train.steps=2",
        "train.microbatch_tokens=64",
        "train.save_updates=true",
    )
    text = capsys.readouterr().out
    assert "delta_layers.linear_attn.in_proj_qkv" in text
    assert "delta_layers.linear_attn.in_proj_a" not in text  # small, and left alone
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    # sampling and training agree on the tokens' probabilities
    assert all(row["mismatch/max"] < 1e-3 for row in rows[1:])
    out = tmp_path / "replayed"
    assert main(["replay", str(hybrid_dir), str(run / "updates"), str(out)]) == 0
    exported = (run / "model" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == exported
    assert (hybrid_dir / "model.safetensors").read_bytes() != exported
    # the export is a model of transformers
    import torch

    tokens = np.random.default_rng(0).integers(0, 40_000, (1, 70))
    oracle, report = AutoModelForCausalLM.from_pretrained(
        run / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(tokens)).logits.numpy()
    model = load_decoder(run / "model", dtype=jnp.float32)

    @jax.jit
    def logits(model):
        positions = jnp.arange(70)[None]
        hidden, _ = model(jnp.asarray(tokens, jnp.int32), positions, Span.causal(70))
        return model.logits(hidden)

    # short queries and keys are scaled to length 1, and their rounding with them
    np.testing.assert_allclose(logits(model), expected, rtol=5e-4, atol=5e-4)


@pytest.mark.slow
def test_predicted_kl_of_a_hybrid_is_the_budget_and_realised_kl_follows_it(
    tiny_run, hybrid_dir
):
    options = ["model.dtype=float32", "kl.budget=constant", "kl.start=1e-4"]
    run = tiny_run("run", f"model.path={hybrid_dir}", "train.steps=2", *options)
    for row in read_metrics(run)[1:]:
        assert row["kl/predicted"] == pytest.approx(row["kl/budget"], rel=1e-4)
        assert row["kl/realised"] == pytest.approx(row["kl/predicted"], rel=0.1)


def test_a_hybrid_that_servers_could_not_compute_is_refused(tiny_config, hybrid_dir):
    options = [f"model.path={hybrid_dir}", "rollout.engine=sglang"]
    options += ["rollout.urls=[http://127.0.0.1:9]", "model.dtype=float32"]
    with pytest.raises(ValueError, match=r"`model\.dtype` must be bfloat16 for SGLang"):
        train(load_config(tiny_config, options))
    with pytest.raises(ValueError, match=r"`model\.dtype` must be bfloat16 for SGLang"):
        serve_options(load_config(tiny_config, options))
    served = serve_options(load_config(tiny_config, [*options[:1], "serve.tp=2"]))
    assert served.has_delta
    with pytest.raises(
        ValueError, match=r"divide the model's key heads .*\(2\), got 4"
    ):
        serve_options(load_config(tiny_config, [*options[:1], "serve.tp=4"]))
