"""Mistakes that others made, each with the tests that keep it from being made here.

`HELD_BY` is the index: what must hold, and the tests that are named after it. A test that is
renamed or removed makes the index red. Below it stand those traps that no other file has a place
for.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.layers import BlockConfig, Decoder, MultiHeadAttention
from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    Lengths,
    Wants,
    Window,
    attention,
    blockwise,
    observe,
)
from regard.ops.shape import Shape

HELD_BY = {
    "a row that may see nothing is zeros, with finite gradients": [
        "test_a_row_with_nothing_to_see_is_zeros_and_gives_no_gradient",
        "test_a_row_with_nothing_to_see_has_weights_0_and_log_sum_minus_infinity",
        "test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients",
        "test_a_row_with_nothing_to_see_gives_zeros_forward_and_backward",
        "test_a_row_that_sees_nothing_gives_the_bias_of_the_output_and_finite_gradients",
        "test_gradients_of_rows_with_nothing_to_see_are_zeros",
    ],
    "finfo.min and -inf mean the same": [
        "test_lowest_number_of_each_type_and_minus_infinity_both_hide_a_key",
        "test_the_lowest_number_of_its_own_type_means_may_not_look",
    ],
    "NaN or inf in a masked key or value never leaks": [
        "test_nan_or_inf_in_a_masked_key_or_value_never_leaks",
        "test_a_nan_in_a_padded_key_stays_unseen",
        "test_what_an_empty_slot_holds_never_leaks",
    ],
    "mask polarity is one; a float mask is never read as a bool one": [
        "test_true_means_may_look",
        "test_bias_and_float_tensor_are_refused_as_mask",
        "test_a_float_mask_of_zeros_and_ones_is_added_and_not_read_as_bool",
    ],
    "causal with fewer queries than keys, and one query with a cache": [
        "test_last_query_sits_on_the_last_key_whatever_the_lengths",
        "test_is_causal_counts_from_the_start",
        "test_cached_equals_uncached_token_by_token_in_chunks_of_any_size",
    ],
    "causality holds also when weights are asked for": [
        "test_causality_holds_also_when_weights_are_asked_for",
        "test_asking_for_weights_changes_no_bit_of_the_output",
    ],
    "eval gives what train gives": [
        "test_evaluation_gives_what_training_gives_bit_for_bit_without_dropout",
        "test_a_padded_batch_keeps_its_length_in_evaluation",
        "test_hooks_on_every_submodule_fire_in_evaluation_as_in_training",
        "test_train_and_eval_give_the_same_and_hooks_fire_in_both",
    ],
    "a mask of another float type under autocast": [
        "test_autocast_takes_a_bias_of_any_float_type",
        "test_a_mask_of_another_float_type_works_under_autocast",
    ],
    "the window is not off by one, and is not lost on any path": [
        "test_window_zero_sees_only_itself",
        "test_window_sides_do_not_count_the_query_itself",
        "test_cell_equals_the_float64_reference_or_refuses_with_its_sentence",
    ],
    "softmax runs in float32 for half types; float64 stays": [
        "test_softmax_of_half_types_runs_in_float32",
        "test_float64_stays_float64",
    ],
    "dropout is off in eval": [
        "test_dropout_acts_in_training_and_not_in_evaluation",
        "test_dropout_follows_the_seed_in_training_and_is_off_in_evaluation",
    ],
    "after dropout a row sums to 1 on average only, in the backward too": [
        "test_kept_weights_grow_so_that_a_row_sums_to_one_on_average",
        "test_gradient_of_dropout_carries_the_same_factor",
    ],
    "rotary pairs: neighbouring or half-split": [
        "test_the_two_pairings_are_one_permutation_apart",
        "test_neighbours_pair_each_number_with_the_next",
    ],
    "rotary phases are float32 after casts and inside autocast": [
        "test_rotary_phases_stay_float32_inside_autocast_and_casts",
        "test_rotary_phases_are_float32_after_bfloat16_and_inside_autocast",
    ],
    "partial rotary turns only rotary_dim; queries and keys are compared": [
        "test_partial_rotary_turns_only_its_first_numbers",
        "test_rotary_turns_queries_and_keys_as_the_published_models_do",
    ],
    "scalings are applied or refused, never ignored": [
        "test_a_scaling_is_applied_or_refused_never_ignored",
        "test_scaled_frequencies_are_those_worked_by_hand",
    ],
    "ALiBi slopes: first is 2^(-8/n), others interleave": [
        "test_alibi_slopes_start_at_two_to_the_minus_eight_over_n_and_interleave_beyond",
        "test_slopes_of_other_counts_take_every_second_one_of_the_next_power",
    ],
    "ALiBi and T5 biases span the cache length while decoding": [
        "test_a_relative_table_and_a_prefix_of_the_caller_span_the_cache",
        "test_cached_equals_uncached_token_by_token_in_chunks_of_any_size",
    ],
    "left padding: positions come from the running count of real tokens": [
        "test_padding_on_either_side_leaves_the_positions_of_real_tokens",
        "test_padded_rows_give_what_they_give_alone",
    ],
    "T5 has no 1/√d: a scale of 1 is honoured everywhere": ["test_a_scale_of_one_is_honoured"],
    "T5 has no bias in cross-attention; its maps are those of the original": ["test_family"],
    "Conv1D is transposed, heads are tied, the width is not heads × head width": [
        "test_like_the_original",
        "test_family",
    ],
    "sinusoidal with odd width, and the right exponent": [
        "test_sinusoid_of_odd_width_ends_with_a_sine",
        "test_sinusoid_at_position_one_of_width_eight_is_the_textbook_row",
    ],
    "cached equals uncached, in bf16 within a stated bound": [
        "test_cached_equals_uncached_token_by_token_in_chunks_of_any_size",
        "test_in_bfloat16_cached_is_as_near_to_float64_as_uncached",
    ],
    "a decode step keeps the padding mask": ["test_padded_rows_give_what_they_give_alone"],
    "attention shapes during generation and with beams": [
        "test_a_cached_step_shows_the_last_row_of_the_whole_matrix",
        "test_beams_are_reordered_through_all_layers_and_the_memory",
    ],
    "grouped heads: neighbours share": ["test_neighbouring_query_heads_share_a_key_head"],
    "value width other than key width, odd head widths, a group ratio of 3": [
        "test_cell_equals_the_float64_reference_or_refuses_with_its_sentence",
        "test_grouped_heads_are_torchs",
    ],
    "64-bit offsets are for kernels; strided views of a packed QKV": [
        "test_views_of_a_packed_projection_give_what_copies_give",
        "test_strided_inputs_give_what_their_copies_give",
    ],
    "grids beyond 65,535": ["test_more_heads_than_65535_are_right"],
    "a ragged last key block is -inf, not 0": ["test_a_ragged_last_tile_adds_nothing_to_the_sum"],
    "lse in nats, of the scores after scaling": [
        "test_entropy_and_lse_are_in_nats",
        "test_the_log_sum_is_of_the_scores_that_the_softmax_sees",
    ],
    "what comes out beside the output has a gradient or refuses one in words": [
        "test_gradients_flow",
        "test_what_has_no_gradient_refuses_one_in_words",
    ],
    "received attention can be divided by the queries that could see the key": [
        "test_mean_received_divides_by_the_queries_that_could_see_the_key",
    ],
    "sinks enter the denominator only; softcap comes before mask and softmax": [
        "test_sink_takes_its_share_and_is_in_the_log_sum",
        "test_scale_then_softcap_then_bias_then_mask_then_softmax",
    ],
    "non-contiguous and zero-length inputs, batch 0, one head, one token": [
        "test_cell_equals_the_float64_reference_or_refuses_with_its_sentence",
        "test_empty_inputs_have_empty_answers_on_both",
        "test_empty_inputs_and_single_tokens_run_forward_and_backward",
    ],
    "no N × N buffer at construction": ["test_no_layer_holds_a_buffer_that_grows_with_length"],
    "float64 with a float32 additive mask": [
        "test_float64_with_a_float32_bias_is_right_from_16_keys_on",
        "test_a_float32_mask_on_float64_inputs_is_exact",
    ],
    "a NaN in a query makes that row NaN and no other": [
        "test_a_nan_in_a_query_makes_its_row_nan_and_no_other",
        "test_a_row_is_nan_when_it_looks_at_one_and_no_other_is",
    ],
    "causal with a negative or zero scale": [
        "test_cell_equals_the_float64_reference_or_refuses_with_its_sentence",
        "test_any_scale_is_torchs",
    ],
    "a module given as activation survives": [
        "test_a_module_given_as_activation_survives",
        "test_a_module_as_activation_survives_stacking_copying_and_saving",
    ],
    "is_causal beside a mask; a mask of the wrong shape is refused unread": [
        "test_the_causal_hint_changes_nothing_beside_the_causal_mask",
        "test_a_mask_of_the_wrong_shape_is_refused_even_beside_the_causal_hint",
    ],
    "a batch that is all padding; no keys; a sample with no real token": [
        "test_a_sample_that_is_all_padding_gives_zeros_and_leaves_the_others_alone",
        "test_a_batch_that_is_all_padding_and_one_without_keys_are_zeros",
    ],
    "second and forward-mode derivatives of the plain path": [
        "test_first_and_second_derivatives_of_every_input",
        "test_forward_mode_derivative_is_the_reference",
    ],
    "dynamic-NTK rotary keeps no state between calls": ["test_rotary_forgets_what_it_has_seen"],
    "a last axis that is not contiguous, rows that overlap, every other layout": [
        "test_every_layout_gives_what_the_formula_gives",
        "test_torchs_names_take_every_layout",
    ],
    "a scale of 0 or below in half types; no keys at all with a bool mask": [
        "test_every_scale_is_honoured",
        "test_without_keys_a_bool_mask_gives_zeros_whatever_the_query_holds",
    ],
    "what nobody of its sample may see never matters; what is seen is no plausible number": [
        "test_what_nobody_of_its_sample_may_see_never_matters",
        "test_what_nobody_may_see_never_matters_in_a_compiled_graph",
        "test_a_nan_that_a_query_may_see_makes_its_output_nan",
        "test_an_infinity_is_no_plausible_number_on_a_cpu",
    ],
    "explain and backend= tell of every reason for which a backend is passed over": [
        "test_explain_names_the_backend_that_runs",
        "test_the_short_way_leaves_to_the_long_one_what_it_cannot_know",
    ],
}
EVERY = pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])


def test_every_trap_is_held_by_tests_that_exist() -> None:
    names = {
        node.name
        for path in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    missing = {claim: sorted(set(held) - names) for claim, held in HELD_BY.items()}
    assert not {claim: lost for claim, lost in missing.items() if lost}


@EVERY
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["causal", "padding", "window", "dense"])
def test_nan_or_inf_in_a_masked_key_or_value_never_leaks(
    mask: str, poison: float, backend: str
) -> None:
    rule = {
        "causal": Causal(),
        "padding": Lengths(torch.tensor([5, 3])),
        "window": Window(1, 0),
        "dense": Dense(torch.arange(7) != 6),
    }[mask]
    seen = rule.dense(Shape(2, 3, 7, 7)).expand(2, 3, 7, 7)
    clean = [torch.randn(2, 3, 7, 5, dtype=torch.float64) for _ in range(3)]
    known = attention(*clean, mask=rule, backend="reference")
    for which in (1, 2):
        inputs = [x.clone() for x in clean]
        inputs[which][:, :, 6] = poison
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, mask=rule, backend=backend)
        hidden = ~seen[..., 6]
        torch.testing.assert_close(out[hidden], known[hidden])
        assert out[~hidden].isnan().all()
        (grad,) = torch.autograd.grad(out[hidden].sum(), inputs[0])
        assert grad[hidden].isfinite().all()


@EVERY
def test_causality_holds_also_when_weights_are_asked_for(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 7, 5) for _ in range(3))
    later = k.clone()
    later[:, :, 4:] += 100.0
    for wants in (Wants(weights=True), Wants(rows=range(7))):
        if wants.weights and backend == "blockwise":
            continue
        one, other = (
            observe(q, x, v, mask=Causal(), wants=wants, backend=backend) for x in (k, later)
        )
        assert torch.equal(one.output[:, :, :4], other.output[:, :, :4])
        asked = one.weights if wants.weights else one.rows
        assert asked.triu(1).abs().sum() == 0


@EVERY
def test_a_scale_of_one_is_honoured(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 7, dtype=torch.float64) for _ in range(3))
    known = torch.softmax(q @ k.mT, -1) @ v
    torch.testing.assert_close(attention(q, k, v, scale=1.0, backend=backend), known)
    layer = MultiHeadAttention(14, 2, scale=1.0).double()
    x = torch.randn(1, 5, 14, dtype=torch.float64)
    heads = [
        p(x).view(1, 5, 2, 7).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    whole = torch.softmax(heads[0] @ heads[1].mT, -1) @ heads[2]
    torch.testing.assert_close(layer(x), layer.out_proj(whole.transpose(1, 2).flatten(2)))


def test_a_ragged_last_tile_adds_nothing_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    # 67 equal keys in tiles of 8: were the rest of the last tile 0 and not -inf, 72 would count.
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 8)
    assert blockwise.tile_sizes(Shape(1, 1, 11, 67)) == (8, 8)
    q, k = torch.zeros(1, 1, 11, 5), torch.zeros(1, 1, 67, 5)
    for backend in ("reference", "blockwise"):
        seen = observe(q, k, torch.ones(1, 1, 67, 2), wants=Wants(lse=True), backend=backend)
        torch.testing.assert_close(seen.lse, torch.full((1, 1, 11), math.log(67)))
        torch.testing.assert_close(seen.output, torch.ones(1, 1, 11, 2))


@EVERY
def test_a_nan_in_a_query_makes_its_row_nan_and_no_other(backend: str) -> None:
    q, k, v = (torch.randn(2, 3, 7, 5) for _ in range(3))
    known = attention(q, k, v, backend=backend)
    q[1, 2, 3, 4] = math.nan
    out = attention(q, k, v, backend=backend)
    assert out[1, 2, 3].isnan().all()
    out[1, 2, 3] = known[1, 2, 3]
    torch.testing.assert_close(out, known)


@EVERY
def test_a_batch_that_is_all_padding_and_one_without_keys_are_zeros(backend: str) -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, mask=Lengths(torch.tensor([0, 0])), bias=ALiBi(3), backend=backend)
    assert out.abs().sum() == 0
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() == 0 for x in (q, k, v))
    assert attention(q, k[:, :, :0], v[:, :, :0], backend=backend).abs().sum() == 0


def test_no_layer_holds_a_buffer_that_grows_with_length() -> None:
    model: nn.Module = Decoder(BlockConfig(dim=14, n_heads=2, ffn_dim=22, alibi=True), 3)
    assert not list(model.buffers())
