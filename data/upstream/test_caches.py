"""A test for each report, as transformers writes its own: each fails as the class is, and passes with the diff."""

import unittest

import torch
import transformers
from transformers.testing_utils import require_torch, torch_device


@require_torch
class CacheMatchesTheFullPassTest(unittest.TestCase):
    def get_model(self, name, **sizes):
        torch.manual_seed(0)
        common = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.1}
        config = getattr(transformers, f"{name}Config")(**(common | sizes))
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(torch_device)
        # The experts of some classes have no product in double precision.
        return model if name == "MiniMax" else model.double()

    def get_ids(self, batch=1):
        return torch.randint(3, 320, (batch, 24), generator=torch.Generator().manual_seed(0)).to(torch_device)

    def check_in_parts(self, model, sizes, cache_name="past_key_values"):
        ids, cache, parts = self.get_ids(), None, []
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            for part in ids.split(sizes, dim=1):
                output = model(part, use_cache=True, **({} if cache is None else {cache_name: cache}))
                cache = output[cache_name]
                parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-6, atol=1e-6)

    def test_bamba_counts_positions_on_from_the_cache(self):
        sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1],
                 "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_expand": 2}
        self.check_in_parts(self.get_model("Bamba", **sizes), [23, 1])

    def test_moshi_masks_what_its_cache_drops(self):
        model = self.get_model("Moshi", ffn_dim=96, num_attention_heads=4, sliding_window=8)
        self.check_in_parts(model, [1] * 24)

    def test_mamba_continues_with_a_second_chunk(self):
        self.check_in_parts(self.get_model("Mamba", state_size=8), [12, 12], "cache_params")

    def test_zamba2_holds_a_step_to_the_limits_of_a_text(self):
        sizes = {"num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4, "n_mamba_heads": 4,
                 "mamba_d_state": 8, "adapter_rank": 8, "layers_block_type": ["linear_attention", "hybrid"] * 2}
        model = self.get_model("Zamba2", **sizes)
        for module in model.modules():
            if hasattr(module, "dt_bias"):
                # A time step a little below `time_step_min`.
                module.dt_bias.data.fill_(-7.0)
        self.check_in_parts(model, [23, 1])

    def test_gpt_neo_is_right_or_refuses_a_static_cache(self):
        sizes = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
        model, ids = self.get_model("GPTNeo", **sizes), self.get_ids()
        cache = transformers.StaticCache(config=model.config, max_cache_len=31)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            try:
                found = model(ids, past_key_values=cache).logits
            except ValueError:
                return
        torch.testing.assert_close(found, expected)

    def test_git_masks_left_padding_of_a_text_alone(self):
        vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}
        vision["patch_size"] = 8
        model, ids = self.get_model("Git", num_attention_heads=4, vision_config=vision), self.get_ids()
        ids[:, :3] = 0
        mask = (ids != 0).long()
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
            first = model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=places[:, :-1], use_cache=True)
            cache = first.past_key_values
            last = model(ids[:, -1:], attention_mask=mask, position_ids=places[:, -1:], past_key_values=cache).logits
        torch.testing.assert_close(last, expected[:, -1:])

    def test_minimax_states_follow_their_beams(self):
        sizes = {"num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 16, "num_local_experts": 4, "layer_types": ["full_attention", "linear_attention"] * 2}
        model, ids = self.get_model("MiniMax", **sizes), self.get_ids(batch=2)
        swap = torch.tensor([1, 0], device=torch_device)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            cache = model(ids[swap, :-1], use_cache=True).past_key_values
            cache.reorder_cache(swap)
            last = model(ids[:, -1:], past_key_values=cache).logits
        torch.testing.assert_close(last, expected[:, -1:], rtol=1e-4, atol=1e-4)
