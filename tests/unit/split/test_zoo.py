"""A sample of the sweep over `transformers`: tiny models of many families, cut and compared with one process."""

import pytest

from benchmarks.zoo import run_pair

# Those that are quick to build and to trace; `benchmarks/zoo.py` runs all.
SAMPLE = [
    "gpt2/GPT2LMHeadModel",
    "gpt_bigcode/GPTBigCodeForCausalLM",
    "granite/GraniteForCausalLM",
    "helium/HeliumForCausalLM",
    "gpt_neox/GPTNeoXForCausalLM",
    "falcon/FalconForCausalLM",
    "granitemoe/GraniteMoeForCausalLM",
    "ernie4_5/Ernie4_5ForCausalLM",
    "glm/GlmForCausalLM",
    "gptj/GPTJForCausalLM",
    "hyperclovax/HyperCLOVAXForCausalLM",
    "emu3/Emu3ForCausalLM",
    "jais2/Jais2ForCausalLM",
    "glm4_moe/Glm4MoeForCausalLM",
    "electra/ElectraForCausalLM",
    "olmo/OlmoForCausalLM",
    "cohere2_moe/Cohere2MoeForCausalLM",
    "openai-gpt/OpenAIGPTLMHeadModel",
    "doge/DogeForCausalLM",
    "exaone_moe/ExaoneMoeForCausalLM",
    "gpt_oss/GptOssForCausalLM",
    "nanochat/NanoChatForCausalLM",
    "pegasus/PegasusForCausalLM",
    "gemma/GemmaForCausalLM",
    "bigbird_pegasus/BigBirdPegasusForCausalLM",
    "musicgen_melody/MusicgenMelodyForCausalLM",
    "metaclip_2/MetaClip2ForImageClassification",
    "diffllama/DiffLlamaForCausalLM",
    "glm4_moe_lite/Glm4MoeLiteForCausalLM",
    "biogpt/BioGptForCausalLM",
    "lfm3/Lfm3ForCausalLM",
    "llama4_text/Llama4ForCausalLM",
    "blenderbot-small/BlenderbotSmallForCausalLM",
    "fuyu/FuyuForCausalLM",
    "bloom/BloomForCausalLM",
    "bert/BertForMaskedLM",
    "ctrl/CTRLLMHeadModel",
    "llama/LlamaForCausalLM",
    "phi3/Phi3ForCausalLM",
    "mvp/MvpForCausalLM",
]


@pytest.mark.parametrize("pair", SAMPLE)
def test_a_tiny_model_over_three_stages_equals_one_process(pair):
    record = run_pair(*pair.split("/"), counts=(3,))
    assert record["outcome"] == "equal", record


def test_the_sample_is_forty_architectures():
    assert len({pair.partition("/")[0] for pair in SAMPLE}) == 40
