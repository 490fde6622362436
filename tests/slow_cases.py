"""Cases that the usual suite leaves out: long cases of a test of which other, shorter cases run.

Tests that are slow as a whole carry the mark `slow` in their own file.
"""

import collections
import re

import pytest

# A pattern of `file.py::test[case]`, and the reason that the usual suite can leave the cases out.
SLOW_CASES = {
    r"test_latent_up_chunks\.py::test_up_chunk_attention_equals_its_reference\[chunks2": (
        "another case has windows that begin inside a chunk and inside its tiles"
    ),
    r"test_goldens\.py::TestGoldens::test_through_host_and_disk\[2-": (
        "test_kv_offload and test_disk_engine run both kinds of pages on two devices"
    ),
    r"test_goldens\.py::TestGoldens::test_through_host_and_disk\[1-(?!tiny-(deepseek_v3|gemma2)\])": (
        "one group of pages runs in test_kv_offload and test_disk_engine; tiny-gemma2 has two"
    ),
    r"test_goldens\.py::TestGoldens::test_(in_a_batch\w*\[tiny-deepseek|chunked_prefill\[16-tiny-deepseek|pre_empted_half_way"
    r"\[pages-kept-tiny-deepseek)": "the same programs run with other steps in the other tests",
    r"test_goldens\.py::TestGoldens::test_chunked_prefill\[1-(?!tiny-gemma2\])": (
        "chunks of 7 and 16 tokens run for the families of every kind of layer"
    ),
    r"test_goldens\.py::TestGoldens::test_(chunked_prefill|pre_empted_half_way|in_a_batch|warm_prefix)"
    r"\w*\[(.*-)?tiny-(llama3rope|mistral|qwen2|qwen3|glm4_moe)\]": (
        "these families differ from tiny-llama in weights and rotary positions, which requests alone compare"
    ),
    r"test_goldens\.py::TestGoldens::test_(chunked_prefill|pre_empted_half_way|warm_prefix)"
    r"\w*\[(.*-)?tiny-(qwen3_moe|gemma3_text)\]": (
        "tiny-mixtral and tiny-gemma2 have the same pages, and a batch with others has chunks of many sizes"
    ),
    r"test_goldens\.py::"
    r"TestGoldens::test_(chunked_prefill|pre_empted_half_way|warm_prefix)\w*\[(.*-)?tiny-gpt_oss\]": (
        "tiny-gemma2 has the same page groups, and a batch with others has chunks of many sizes"
    ),
    r"test_goldens\.py::TestGoldens::test_(chunked_prefill|pre_empted_half_way|warm_prefix|prompt_logprobs)"
    r"\w*\[(.*-)?tiny-gemma4_text\]": (
        "tiny-gemma2 has two page groups, too, and a batch with others has chunks of many sizes"
    ),
    r"test_goldens\.py::TestGoldens::test_(chunked_prefill|pre_empted_half_way|warm_prefix|prompt_logprobs)"
    r"\w*\[(.*-)?tiny-gemma4_e2b\]": (
        "tiny-gemma2 has two page groups, too, and a batch with others has chunks of many sizes"
    ),
    r"test_compiler\.py::test_drawn_plans(_compiled)?\[tiny-gemma4_e2b": (
        "test_scattered compiles a plan of this model, and plans of tiny-llama are drawn"
    ),
    r"test_compiler\.py::test_a_plan_runs_every_composition\[four_qkv_plan-tiny-gemma4_e2b": (
        "test_scattered runs a plan of this model, and four nano-operations of KQV of tiny-llama run"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-gemma4_e2b": (
        "test_scattered runs this model on two devices, and tiny-gemma4_text runs here"
    ),
    r"test_goldens\.py::TestGoldens::test_(one_request\w+|in_a_batch\w+)\[tiny-gemma4_e2b": (
        "test_gemma4 compares its logits, and test_scattered runs its plans"
    ),
    r"test_goldens\.py::TestGoldens::test_(one_request\w+|in_a_batch\w+)\[tiny-gemma4_text": (
        "test_tensor_parallel runs this golden, and test_gemma4 compares the logits of one device"
    ),
    r"test_goldens\.py::TestGoldens::test_one_request\w+\[tiny-glm4_moe": (
        "test_data_parallel runs this golden, and test_check_precision this model on one device"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-deepseek_v3": (
        "test_latent_forms runs this golden on two devices"
    ),
    r"test_latent_forms\.py::test_goldens\w+\[1": "two devices run",
    r"test_layered_step\.py::test_a_step_of_one_program_gives_the_same_numbers": (
        "test_enforce_eager compares layered steps with those of one program"
    ),
    r"test_scattered\.py::test_scattered_plans_compute_the_plain_forward\[post-norms": (
        "the model with embeddings of each layer has post-norms, too"
    ),
    r"test_two_stage_search\.py::test_found_plans_are_the_plain_forward\[fp8\]": (
        "scattered plans and plans with sums alone run in fp8"
    ),
    r"test_goldens\.py::TestGoldens::test_\w+\[(.*-)?tiny-gemma4_dense\]": (
        "test_gemma4 compares its logits, and the engine runs tiny-gemma4_text"
    ),
    r"test_goldens\.py::TestGoldens::test_prompt_logprobs"
    r"\[tiny-(llama3rope|mistral|qwen2|qwen3|qwen3_moe|glm4_moe|gpt_oss)\]": (
        "their heads are those of tiny-llama and tiny-mixtral, and the cap of tiny-gemma2 runs"
    ),
    r"test_goldens\.py::test_more_shards_than_key_value_heads\[tiny-qwen3_moe": (
        "tiny-llama has more shards than heads, and tiny-mixtral's experts are sharded"
    ),
    r"test_build\.py::TestPlans::test_an_overlapped_plan_serves_the_golden": (
        "a portfolio serves the golden with an overlapped plan"
    ),
    r"test_lowering_processes\.py::test_a_process_without_a_gpu": (
        "an engine reads what a process lowered, and test_lowered compares kept programs of two devices"
    ),
    r"test_data_parallel\.py::test_goldens_of_whole_experts\[tiny-(glm4_moe|deepseek_v3-1|mixtral-1)": (
        "gpt-oss and Qwen3 run with one device a rank, Mixtral and DeepSeek-V3 with two"
    ),
    r"test_decode_attention\.py::test_pieces_of_one_pair_spill_nothing_on_the_h200\[bfloat16": (
        "the form with more registers, e4m3, is compiled"
    ),
    r"test_guessed_pages\.py::test_an_engine\w+\[bad": (
        "an engine of a good guess runs, and other bytes are tried"
    ),
    r"test_enforce_eager\.py::test_the_tokens_are_those_of_the_default_mode\[tiny-(mixtral|opt)": (
        "tiny-gemma2 runs, whose programs the next test needs, too; other tests run shards and stages"
    ),
    r"test_enforce_eager\.py::test_a_layer_for_an_h200\w+\[1": "a layer of two devices is compiled",
    r"test_first_layouts\.py::test_\w+\[stages": (
        "one executor runs the same loop, and each stage has its code"
    ),
    r"test_gpt_oss\.py::test_no_part_can_be_left_out_of_the_golden\[(softmax|router|yarn's (frequ|bord))": (
        "the logits of the golden are compared, and parts that are invisible in other models run"
    ),
    r"test_gemma4\.py::test_no_part_can_be_left_out_of_the_golden"
    r"\[the (frequencies|scale|soft cap|size of the router)": (
        "the logits of the golden are compared, and parts that only weights show run"
    ),
    r"test_sink_logits\.py::test_decode_attention_equals_its_reference\[(None-lengths[02]|unified_max1)": (
        "the case with a window runs, and sinks meet a unified max value in chunk attention"
    ),
    r"test_sink_logits\.py::test_chunk_attention_equals_its_reference\[chunks[01]-": (
        "the case with a unified max value runs, and sinks meet a window in decode attention"
    ),
    r"test_mxfp4\.py::test_(each_row\w+\[one|a_shape_without|biases_and|on_an_h200_\w+\[(1\]|1024|2048))": (
        "a skewed routing with gates runs, and tiles of 16 rows are compiled"
    ),
    r"test_expert_int4\.py::"
    r"test_(each_row\w+\[one token|a_shape_without|on_an_h200_\w+\[(qwen|mixtral 2048))": (
        "groups of 64 and of 128 run, and the tallest epilogue without gates is compiled"
    ),
    r"test_int4_experts\.py::test_the_logits_are_those_of_the_numbers\[bfloat16": "float32 runs",
    r"test_lowered\.py::test_the_programs_of_all_kinds\w+\[tiny-gpt_oss-int4": (
        "tiny-gpt_oss has mxfp4 experts"
    ),
    r"test_gpt_oss\.py::test_experts_that_stay_in_mxfp4_give_equal_logits\[bfloat16": "float32 runs",
    r"test_side_stream_plans\.py::test_it_is_the_plain_forward_on_four_devices": (
        "test_exchange computes the plain forward with peer copies"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel"
    r"\[(stories260K|tiny-(llama3rope|mistral|qwen2|qwen3|qwen3_moe|gemma3_text|glm4_moe))\]": (
        "these families shard as tiny-llama, tiny-mixtral or tiny-gemma2 does"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-(llama|mixtral|gpt_oss)\]": (
        "tiny-llama and the experts of gpt-oss run on four devices, and tiny-mixtral on two devices a stage"
    ),
    r"test_exchanged_experts\.py::test_the_experts_of_devices_are_\w+\[.*-2\]": "four devices run",
    r"test_grouped_gemm\.py::test_a_device_multiplies_the_rows_of_its_own_experts\[.*swapped": (
        "test_swapped runs this kernel, whose loop over no item is plain"
    ),
    r"test_pipeline_stages\.py::"
    r"TestSameTokens::test_(goldens\[(stories260K-[24]|tiny-deepseek)|at_any_chunking\[1)": (
        "a batch of stories260K runs on four stages, tiny-mixtral on two devices a stage, and chunks of 7 "
        "tokens run"
    ),
    r"test_ragged\.py::test_pieces_arrive\w+\[(one expert|one sender|none)-\w+-1\]": (
        "these counts run with aligned pieces, and drawn counts without"
    ),
    r"test_sort_rows\.py::test_the_kernel\w*\[(False-[19]-|True-35-)": (
        "the other precision of the rows runs each size"
    ),
    r"test_pipeline_stages\.py::TestSameTokens::test_in_a_batch_with_others\[2": "four stages run",
    r"test_pipeline_stages\.py::TestSameTokens::test_on_an_overlapped_plan": (
        "stages get the layers of such a plan, and test_portfolio serves steps on overlapped plans"
    ),
    r"test_pipeline_stages\.py::TestSameTokens::test_goldens\[tiny-(gemma2|opt)": (
        "test_staged_tiers runs tiny-gemma2 on two stages; learned positions are added with the embedding"
    ),
    r"test_pipeline_stages\.py::TestSameTokens::test_in_a_storm_of_pre_emptions\[pages-kept": (
        "test_loop pre-empts with kept pages, and stages run with a warm prefix cache"
    ),
    r"test_staged_tiers\.py::test_the_tokens_of_one_device_\w+\[two": (
        "two groups of pages run; test_page compares the bytes of pages on two devices a stage"
    ),
    r"test_staged_tiers\.py::test_a_restart_with_other_stages_finds_the_pages\[(two of two|windows)": (
        "test_page compares the bytes of pages on two devices a stage; both directions run with one group"
    ),
    r"test_loop\.py::TestSameSeedSameTokens::test_at_any_chunking\[1": "chunks of more tokens run",
    r"test_loop\.py::TestSameSeedSameTokens::test_in_any_batch\[backwards": (
        "pipeline stages run the same requests in another batch"
    ),
    r"test_loop\.py::TestSameSeedSameTokens::test_on_two_devices": (
        "a sharded vocabulary gives the same draws in test_noise_of_draws, and goldens run on two devices"
    ),
    r"test_loop\.py::TestNoShapeSurprises::test_nothing_compiles_after_warm_up\[2": (
        "one device and two pipeline stages run"
    ),
    r"test_loop\.py::TestSameSeedSameTokens::test_on_an_overlapped_plan": (
        "test_portfolio serves steps on overlapped plans, with other requests"
    ),
    r"test_8_bits\.py::"
    r"test_near_the_wide_model\[(stories260K-numbers[02]-0\.(06|15)|tiny-(llama|opt|qwen3))": (
        "an 8-bit cache runs on two devices, and with 8-bit weights on one"
    ),
    r"test_8_bits\.py::test_an_int8_cache_on_two_devices_is_that_of_one": (
        "the engine on two devices is compared with the wide model"
    ),
    r"test_span_engine\.py::test_(in_eight_bits|full_spans_are_the_dense|spans_change)": (
        "test_attention_spans compares the op with the dense op and with its definition, and 8 bits run "
        "without spans"
    ),
    r"test_8_bits\.py::test_on_two_devices\[tiny-mixtral": (
        "tiny-mixtral runs on one device, and tiny-llama on two devices"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[.*-two devices, attends on the host": (
        "two devices run for every family, and OPT attends on the host"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[tiny-(mistral|qwen2|qwen3)-disk": (
        "these families differ from tiny-llama in weights only"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[tiny-(gemma3_text|qwen3_moe)-": (
        "gemma2 and mixtral run on the same tiers"
    ),
    r"test_offloaded_tokens\.py::"
    r"test_every_other_family\[tiny-(mistral|mixtral|qwen2|qwen3|gpt_oss)-two devices": (
        "the dense families differ from tiny-llama in weights only; gemma2 runs"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[tiny-mixtral-disk": (
        "tiny-gpt_oss, which also has experts, runs on the disk"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[tiny-gemma2-two devices\]": (
        "tiny-gemma2 runs on the host and the disk, and other models on two devices in test_offload_shards"
    ),
    r"test_offload_calls\.py::test_the_run_after_a_stopped_run_gets_its_tokens"
    r"\[(?!mixed\])": (
        "the case mixed covers every tier, and concurrent calls stop a run whose KV on disk the host attends "
        "to"
    ),
    r"test_sparse_values\.py::test_few_rows_(give_the_same_tokens_on_every_tier\[tiny-opt|in_4_bits)": (
        "tiny-gemma2 runs on every tier, and attends in both places"
    ),
    r"test_sparse_values\.py::test_a_choice_of_all_rows_gives_the_engines_tokens\[True": (
        "tiny-gemma2 attends to few rows on the host"
    ),
    r"test_sparse_values\.py::TestRowsOnDisk::test_a_fault_of_a_row_ends_the_run\[(True-|False-EIO)": (
        "a wrong bit and a short file run, and the files have a test of their own"
    ),
    r"test_offload_stages\.py::"
    r"test_(two_stages_(give_the_tokens_of_one_device\[False|read_few_rows)|a_fault_in)": (
        "a pipeline runs with attention on the host, and the traffic test attends on the device"
    ),
    r"test_offload_shards\.py::test_two_devices_\w+\[attends on the devices": (
        "every order runs with attention on the host; test_every_other_family attends on two devices"
    ),
    r"test_offloaded_tokens\.py::test_opt_on_all_tiers_in_every_order\[attends on the device": (
        "every order runs with attention on the host, and batches that end early without it"
    ),
    r"test_offloaded_tokens\.py::test_batches_that_end_early_leave_a_diagonal\[True": (
        "every order runs with attention on the host"
    ),
    r"test_value_rows\.py::test_the_report_has_a_row": (
        "the chunks and the last words are tested by themselves"
    ),
    r"test_offload_io\.py::test_the_account_equals_the_allocated_bytes\[2": "one device runs",
    r"test_compiler\.py::test_two_nano_batches_with_4_bit_weights": (
        "an engine runs weights in 4 bits, and scattered phases run on weights in 8 bits"
    ),
    r"test_compiler\.py::test_drawn_plans\[tiny-llama-1": "test_some_drawn_plans draws fewer of them",
    r"test_compiler\.py::test_drawn_plans\[tiny-mixtral-1": (
        "a plan of mixtures runs in test_exchange, and drawn plans cut the same ops of tiny-llama"
    ),
    r"test_compiler\.py::test_drawn_plans\[tiny-opt": (
        "plans of tiny-llama are drawn; no stream, learned positions and int8 are simpler cases"
    ),
    r"test_compiler\.py::test_drawn_plans\[(tiny-gemma2-2|tiny-llama-2|tiny-llama-4)": (
        "test_op_cuts runs a plan on two devices op by op, and test_scattered compiles plans on two and four"
    ),
    r"test_compiler\.py::test_drawn_plans(_compiled)?\[tiny-(glm4_moe|deepseek_v3)": (
        "tiny-mixtral has the same kinds of values"
    ),
    r"test_exchange\.py::test_plans_with_peer_copies_compute_the_plain_forward\[(post-norms|fp8|four)": (
        "drawn plans run op by op, and a plan of experts runs with copies"
    ),
    r"test_compiler\.py::test_a_plan_runs_every_composition\[(phased_plan|two_nano)": (
        "four KQV operations on two devices run; test_scattered runs phases in fp8, experts run with peer "
        "copies"
    ),
    r"test_scattered\.py::test_scattered_plans_compute_the_plain_forward\[experts": (
        "experts run with peer copies; scattered sums run with post-norms and in fp8"
    ),
    r"test_compiled_plans\.py::test_the_schedule_follows_the_plan\[(searched|phases\]|two |Llama)": (
        "phases on two devices are compiled, with sums; test_collective_bench compiles copies"
    ),
    r"test_compiled_plans\.py::test_(without_barriers_xla_merges|gemms_are_issued_after)": (
        "both change the compiler to show that the checker finds the fault; two tests of the checker run"
    ),
    r"test_compiled_step\.py::test_of_8_bits_neither": "the step on Hopper's kernels is compiled",
    r"test_chunk_attention\.py::test_for_the_h200_it_uses_its_units\[(32-8-128-int8|8-4-256-bfloat16)": (
        "the e4m3 kernel is compiled; test_compiled_step compiles the bfloat16 kernel"
    ),
    r"test_chunk_attention\.py::test_chunk_attention_equals_its_reference\[chunks[0-59]-": (
        "chunks 6 to 8 run; the e4m3 cases have keys in second pages and a scale of 0"
    ),
    r"test_chunk_attention\.py::test_an_e4m3_cache_is_multiplied_as_e4m3\[chunks[123]-": (
        "the first chunks run, and bfloat16 runs with a cap and with windows"
    ),
    r"test_chunk_attention\.py::test_small_weights_of_8_bits_have_their_share\[extra1": "the first case runs",
    r"test_chunk_attention\.py::test_rows_whose_scores_are_all_minus_infinity_become_0\[(bfloat16|float8)": (
        "int8 runs"
    ),
    r"test_chunk_attention\.py::test_scores_that_a_scale_of_8_bits_makes_0_weigh_the_same\[20": (
        "the case without a cap runs"
    ),
    r"test_chunk_attention\.py::test_rows_outside_the_unified_max_value_fall_back"
    r"\[(?!above-1-False-3)": (
        "the case above-1-False-3 runs, and rows whose scores are minus infinity fall back with int8"
    ),
    r"test_decode_attention\.py::test_decode_attention_equals_its_reference\[lengths([0-69]|1[01])-": (
        "the same lengths, heads and tiles run with another dtype or window, in test_spans or with sinks; "
        "test_decode_join adds parts"
    ),
    r"test_spans\.py::test_spans_of_at_least_the_length_are_dense": (
        "the definition is compared with spans of 10,000 keys, and one window with the spans of all heads"
    ),
    r"test_spans\.py::test_decode_attention_reads_only_what_its_heads_see\[lengths[02345]-": (
        "the second case runs, and the dtypes of the cache run with windows"
    ),
    r"test_spans\.py::test_chunk_attention_reads_only_what_its_heads_see\[chunks[1234]-": (
        "the first case runs, and the dtypes of the cache run with windows"
    ),
    r"test_decode_attention\.py::test_it_fits_a_stream_region": (
        "the dense, flat and grouped kernels fit one, and test_compiled_step compiles decode attention"
    ),
    r"test_decode_attention\.py::test_rows_outside_the_unified_max_value_equal_the_reference"
    r"\[(None-|unified_max1-bfloat16|unified_max4-float8|unified_max5-int8)": (
        "bfloat16 runs with rows outside, and all dtypes run without a unified max value"
    ),
    r"test_fp8_gemm\.py::test_a_weight_in_blocks_is_scaled\w+\[kernel[03]": (
        "each kernel runs, with a residual or with gates"
    ),
    r"test_fp8_gemm\.py::"
    r"test_(fp8_gemm_equals_its_reference\[kernel[15]|values_and_scales_pass_.*\[fp8_flat)": (
        "kernels 0, 2, 3, 4 and 6 run, and one kernel runs in a stream region"
    ),
    r"test_block_fp8\.py::test_(each_row\w+\[one (token|expert)|on_an_h200_\w+\[qwen (1\]|64|1536))": (
        "a skewed routing with gates and tall tiles run; the tallest tiles and one row are compiled"
    ),
    r"test_expert_mlp\.py::test_(no_registers_are_spilled_on_an_h200\[64|it_equals_two\w+\[one)": (
        "lower and higher tiles are compiled, and a skewed routing leaves an expert without tokens"
    ),
    r"test_swapped\.py::test_e4m3_rows_are_multiplied_and_scaled\[(one token|blocks of 16)": (
        "one token runs in bfloat16, and e4m3 rows run with gates and without"
    ),
    r"test_swapped\.py::test_few_registers_are_spilled_on_an_h200\[(64|256|2048-False)": (
        "the lowest tile is compiled, and the highest tile of e4m3 rows, which spills"
    ),
    r"test_swapped\.py::test_it_fits_a_stream_region": "another grouped kernel fits one",
    r"test_int4_gemm\.py::test_for_the_h200_\w+\[(1|8-28672|16)-": (
        "a residual of 8 tokens, gates of 32 tokens, and 64 tokens, are compiled"
    ),
    r"test_draw\.py::test_the_kernel_draws_the_tokens_of_its_reference\[2308": (
        "smaller and larger vocabularies run"
    ),
    r"test_draw_filtered\.py::test_the_kernel_draws_the_tokens_of_its_reference\[512": (
        "4612 columns have full groups, too, and rows of 512 columns are drawn alone and together"
    ),
    r"test_dense_gemm\.py::test_no_sm_does_much_more_than_its_share\[(104|112|120)": "20 and 132 SMs run",
    r"test_triton\.py::test_they_compile_for_real_shapes\[90": "the shapes compile for the older GPU",
    r"test_two_stage_search\.py::test_the_simulation_agrees_with_the_solver"
    r"\[(network-2-False|nano-batches-1|memory-1|all-2|sequential)": (
        "the cases all-1 and network-2-True run"
    ),
    r"test_two_stage_search\.py::test_a_bound_cuts_a_chain\w+\[places1": "the first places run",
    r"test_two_stage_search\.py::test_attention_beside_products": (
        "test_tokens_that_do_not_decode finds attention beside products, and the simulation agrees with the "
        "solver"
    ),
    r"test_two_stage_search\.py::test_found_plans_are_the_plain_forward\[(fp8, sums alone|scattered)": (
        "the fp8 case runs"
    ),
    r"test_sampling_memory\.py::test_full_makes_few_and_counts_in_place": (
        "the memory of the plain sampler is read, and the kernels of the full sampler have tests of their own"
    ),
    r"test_two_stage_search\.py::test_llama_on_a_modelled_h200": (
        "test_found_plans and test_known_orders check plans of large models"
    ),
    r"test_prediction_errors\.py::test_slowdowns_of_pairs": (
        "each report is predicted with the slowdowns of its pairs within a bound"
    ),
    r"test_prediction_errors\.py::test_\w+"
    r"\[(8b-(variants|traces|fourth|lean-fp8)|deepseek|qwen2|70b-tp4-fp8-kernels)": (
        "the other reports of each device count and dtype are predicted"
    ),
    r"test_machine_curves\.py::test_what_is_measured_here_makes_a_machine": (
        "fits and files of machines run without a measurement"
    ),
    r"test_kernel_set\.py::test_the_kernels_take_what_the_family_gives_them"
    r"\[(gemma2|glm4|llama\]|mistral|mixtral|qwen[23]|tiny llama)": (
        "gemma3 and opt have the same kinds of layers; the H200 tests compile Llama's heads"
    ),
    r"test_kernels\.py::test_a_case_of_each_group_can_be_traced"
    r"\[(decode_(attention(_int8|_fp8)?|unified)|chunk_attention(_int8)?|dense_gemm_1(04|12)|layer_fp8|"
    r"fp8_tiles|decode_fp8_unified|chunk_attention_fp8|chunk_unified)\]": (
        "a group of each op and a layer run, and the kernels' own tests run the other dtypes"
    ),
    r"test_console\.py::test_help_of_a_command\[(ask|bench|search)": (
        "test_every_command_takes_dashes starts these programs"
    ),
    r"test_command\.py::test_a_setting_that_cannot_work_.*\[arguments[^1]-": (
        "other tests hold the messages; a wrong engine setting ends a process, and a missing model in "
        "test_demo"
    ),
    r"test_triton\.py::test_supported_heads_fit_the_shared_memory\[8\.6": (
        "the GPU with the least shared memory is compiled for"
    ),
    r"test_triton\.py::test_triton_kernels_equal_their_references": (
        "Triton compiles the kernels at real shapes; its interpreter takes long"
    ),
    r"test_sampling\.py::test_rows_a_block_at_a_time_are_rows_together\[4-2": "the case of five rows runs",
    r"test_sampling_memory\.py::test_of_many_rows_it_makes_as_few_as_of_a_block": (
        "the memory of a block of rows is compiled and read"
    ),
    r"test_sampling\.py::test_full_is_what_vllm_means\[of_few_blocks": (
        "test_frequencies draws from a few blocks, and the law runs over all blocks"
    ),
    r"test_sampling\.py::test_frequencies\[kwargs([1-4]-full|[2-4]-of_few)": (
        "test_full_is_what_vllm_means covers each setting; one setting runs over each number of blocks"
    ),
    r"test_lowered\.py::test_the_programs_of_all_\w+\[(tiny-gemma3_text|tiny-llama-fp8)": (
        "weights in 4 and 8 bits, experts, learned positions and an 8-bit cache run"
    ),
    r"test_lowered\.py::test_a_kept_plan_is_compiled_as_the_plan": (
        "an engine of kept programs draws the same tokens as another engine"
    ),
    r"test_notebooks\.py::test_notebook_runs_and_draws": (
        "test_regimes, test_expert_load, test_offload_command, test_choose_spans and test_sweep run their "
        "calls"
    ),
    r"test_faults\.py::test_a_burst_of_streams_loses_none": (
        "test_soak begins 1,600 calls at once, also more than gRPC's core holds by default"
    ),
    r"test_data_parallel\.py::"
    r"(test_goldens\[tiny-(qwen3_moe|gpt_oss|glm4_moe|mixtral|deepseek_v3-2)|\w+::test_for_every\w+\[2)": (
        "the goldens of tiny-deepseek_v3 on four ranks run; other tests compare tiny-mixtral with one device"
    ),
    r"test_data_parallel\.py::test_goldens_of_two_nano_batches"
    r"\[(?!tiny-(mixtral-2-1|qwen3_moe-4-1|deepseek_v3-2-2))": (
        "tiny-mixtral gathers, tiny-qwen3_moe exchanges, and tiny-deepseek_v3 has ranks of two devices"
    ),
    r"test_check_precision\.py::test_rounded_weights_cost_part_of_what_fp8_costs\[mixtral": (
        "the other mixture has the same formats"
    ),
    r"test_check_precision\.py::test_(in_float32_only_the_format|mxfp4_of_a_checkpoint)": (
        "formats of weights and of the cache are compared with bfloat16, and a format is refused"
    ),
    r"test_eplb\.py::test_(goldens_while_experts_move\[[12]|all_tokens_to_one_device|a_server)": (
        "the goldens of four devices run while experts move"
    ),
    r"test_http_faults_engine\.py::test_40_concurrent_traces_answer_as_alone\[1": (
        "the traces of one seed run"
    ),
    r"test_smollm2\.py::test_perplexity": (
        "the first tokens of a window are compared, and the goldens of small models have long prompts"
    ),
    r"test_commands\.py::test_the_command_as_a_process": (
        "the other tests run the command in their process, and test_exit_status starts processes"
    ),
    r"test_reuse_commands\.py::test_hierarchy_command": (
        "every tier is found over gRPC, and the engines of all configured tiers are compared"
    ),
    r"test_link_bench\.py::test_the_command": (
        "the rates and both directions at once are tested by themselves"
    ),
    r"test_trace_bench\.py::test_trace_command": (
        "the other tests make the layer, the shares and the watts of a trace without an engine"
    ),
    r"test_memory_command\.py::test_the_command": "the needs and the room are tested by themselves",
    r"test_decode_step\.py::test_many_steps": (
        "each launch is timed and gives the same bits, and the digest finds a difference at any place"
    ),
    r"test_stage_trace\.py::test_a_trace_has_every_step": "a trace of every policy is made and read",
    r"test_exit_status\.py::test_a_command_exits_with_141_after_a_closed_pipe\[jaxflow": (
        "the search ends by the same function"
    ),
    r"test_measure\.py::test_from_a_real_profile": (
        "test_plan_command searches in profiles, and test_portfolio serves the golden with plans"
    ),
    r"test_batch_budget\.py::test_a_batch_uses_idle_capacity_\w+\[2": "the higher rate and limit run",
    r"test_lowering_processes\.py::test_an_engine_reads_what_a_process_lowered\[ranks": (
        "one device runs, and test_eplb compares an engine's moves with those of another process"
    ),
    r"test_goldens\.py::TestGoldens::test_one_request_at_a_time\[stories260K": (
        "tiny-llama3rope and tiny-mistral run, and test_smollm2 has a larger Llama"
    ),
    r"test_data_parallel\.py::test_goldens_of_whole_experts\[tiny-mixtral-2": (
        "tiny-deepseek_v3 runs on two ranks"
    ),
    r"test_chunk_attention\.py::test_chunk_attention_equals_its_reference\[chunks7-24": (
        "heads of 512 columns run with more rows"
    ),
    r"test_larger_sorts\.py::test_for_the_h200_they_are_one_or_two_kernels_that_spill_nothing\[2048-256": (
        "2,048 tokens of narrower rows run"
    ),
    r"test_token_limits\.py::test_the_kernel_keeps_the_tokens_of_its_reference\[2308-1": (
        "a larger vocabulary runs for 64 rows"
    ),
    r"test_route\.py::test_the_kernel_equals_its_reference\[2-32": ("9 tokens run, which have two clusters"),
    r"test_latent_up_chunks\.py::test_up_chunk_attention_equals_its_reference\[chunks0": (
        "a batch with other chunks runs"
    ),
    r"test_sort_rows\.py::test_the_kernel_gives_the_groups_and_the_bits_of_the_reference\[False-35": (
        "the cases with quantized rows run"
    ),
    r"test_flag_names\.py::test_every_command_takes_dashes\[jaxflow-arguments3": (
        "another command of jaxflow runs"
    ),
    r"test_expert_mlp\.py::test_no_registers_are_spilled_on_an_h200\[1\]": ("256 tokens run"),
    r"test_warm_starts\.py::test_a_wrong_number_of_pages_changes_no_token\[known[12]": (
        "one wrong number runs"
    ),
    r"test_kv_offload\.py::test_the_same_tokens_through_eviction_and_pre_emption\[llama-roomy": (
        "the full host pool runs"
    ),
    r"test_rank_tiers\.py::test_the_tokens_of_one_device_through_host_disk_and_pre_emption\[roomy": (
        "the full host pool runs"
    ),
    r"test_decode_attention\.py::test_decode_attention_equals_its_reference\[lengths1[45]-": (
        "test_sink_logits has heads of 64 columns"
    ),
    r"test_latent_chunks\.py::test_chunk_attention_equals_its_reference\[chunks3": ("16 and 128 heads run"),
    r"test_check_precision\.py::test_rounded_weights_cost_part_of_what_fp8_costs\[glm4_moe": (
        "test_dummy_weights and test_8_bits have the parts"
    ),
    r"test_data_parallel\.py::test_goldens_of_whole_experts\[tiny-gpt_oss-1": (
        "tiny-deepseek_v3 runs, and test_one_router compares layers of gpt-oss"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-gemma4_text": (
        "tiny-gemma2 runs, and test_one_request_at_a_time runs Gemma 4"
    ),
    r"test_check_engine\.py::test_the_check_runs_for_layers_that_share_keys": (
        "test_goldens compares the tokens of Gemma 4, and check_plan's tests compare logits"
    ),
    r"test_pipeline_stages\.py::TestSameTokens::test_in_a_batch_with_others\[4": (
        "batches run in the goldens of two stages of two devices and with a warm prefix"
    ),
    r"test_latent_up_chunks\.py::test_for_the_h200_it_spills": (
        "the latent chunk kernel, which has the same tiles, is compiled for the H200"
    ),
    r"test_scattered\.py::test_scattered_plans_compute_the_plain_forward\[fp8, phases": (
        "a scattered plan with embeddings of each layer runs"
    ),
    r"test_kv_offload\.py::test_the_same_tokens_through_eviction_and_pre_emption\[windows-tp2": (
        "tiny-llama runs, and test_rank_tiers and test_disk_engine have windows"
    ),
    r"test_chunk_attention\.py::test_chunk_attention_equals_its_reference\[chunks8-40": (
        "heads of 512 columns run, and test_sink_logits has ragged chunks"
    ),
    r"test_staged_tiers\.py::test_the_tokens_of_one_device_through_host_disk_and_pre_emption\[windows": (
        "test_rank_tiers runs the same tiers on ranks"
    ),
    r"test_compiler\.py::test_a_plan_runs_every_composition\[four_qkv_plan": (
        "drawn plans run every composition"
    ),
    r"test_data_parallel\.py::test_goldens\[tiny-deepseek_v3-4": (
        "its whole experts run on two ranks, and other families on four"
    ),
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-gemma2": (
        "more shards than heads of tiny-llama run, and test_8_bits and test_span_engine cut windows"
    ),
    r"test_route\.py::test_it_sorts_as_the_sort_of_its_choice\[(4-136|3-24)": (
        "8 tokens with all experts of Qwen3-30B-A3B run, and test_one_router compares layers"
    ),
    r"test_route\.py::test_the_kernel_equals_its_reference\[(3-160|2-24)": "other numbers of experts run",
    r"test_lowering_processes\.py::test_an_engine_reads_what_a_process_lowered\[stages": (
        "one device runs, and test_staged_tiers starts stages"
    ),
    r"test_enforce_eager\.py::test_layouts_of_decodes_become_ready_while_a_gpu_serves\[tiny-opt": (
        "tiny-gemma2 runs, which has two groups of pages"
    ),
    r"test_eplb\.py::test_another_process_moves_the_same_experts\[1": "ranks of two devices run",
    r"test_token_limits\.py::test_the_kernel_keeps_the_tokens_of_its_reference\[512-64": (
        "a larger vocabulary runs for 64 rows"
    ),
    r"test_data_parallel\.py::test_goldens_of_two_nano_batches\[tiny-mixtral-2-1": (
        "tiny-qwen3_moe runs on four ranks, tiny-deepseek_v3 on two ranks of two devices"
    ),
    r"test_data_parallel\.py::test_goldens_of_whole_experts\[tiny-qwen3_moe-1": (
        "tiny-deepseek_v3 runs on two ranks"
    ),
    r"test_eplb\.py::test_goldens_of_ranks_while_experts_move\[(2-1|4|2-2-0)": (
        "two ranks of two devices run with copies"
    ),
    r"test_pipeline_stages\.py::TestSameTokens::test_at_any_chunking\[7": (
        "a batch with others has chunks of many sizes, and test_goldens runs chunks of 7 and 16 tokens"
    ),
    r"test_kv_offload\.py::test_the_same_tokens_through_\w+\[windows-tp2-roomy": "the full host pool runs",
    r"test_console\.py::test_help_of_a_command\[batch": "the help of serve runs, and each command has a test",
    r"test_rope_append\.py::test_rope_append_equals_its_reference\[float8_e4m3fn-11": (
        "blocks of 16 tokens run in e4m3, and blocks of 8 in int8"
    ),
    r"test_int4_experts\.py::test_experts_are_the_quantized_form_\w+\[1-": "two devices run",
    r"test_offload_io\.py::test_the_cost_model_counts_the_traffic\[kv1-": "few rows on the disk run",
    r"test_perplexity\.py::": (
        "each 8-bit and 4-bit format is compared with its reference, and test_8_bits compares tokens"
    ),
    r"test_data_parallel\.py::test_goldens_of_two_nano_batches\[tiny-deepseek_v3-2-2": (
        "its experts run whole on two ranks of two devices, whose other operations are two nano-batches"
    ),
    r"test_eplb\.py::test_goldens_while_experts_move\[4": "two ranks of two devices run with copies",
    r"test_eplb\.py::test_the_digests_notice_a_damaged_copy_on_any_device\[(one array|another)": (
        "a copy that did not arrive and a flipped bit are noticed"
    ),
    r"test_8_bits\.py::test_near_the_wide_model\[stories260K": "tiny-mixtral runs in fp8",
    r"test_goldens\.py::TestGoldens::test_tensor_parallel\[tiny-opt": (
        "tiny-gemma2 runs, and test_offload_shards runs shards of OPT"
    ),
    r"test_lowered\.py::test_the_programs_of_all_kinds\w+\[tiny-opt": (
        "an engine without quantization draws from kept programs"
    ),
    r"test_ranked_load\.py::test_all_end_in_the_steps_of_the_busiest_rank\[an idle rank-24": (
        "an idle rank runs with 400 tokens"
    ),
    r"test_decode_attention\.py::test_decode_attention_equals_its_reference\[lengths12-": (
        "512 columns run, and chunks of 256 columns"
    ),
    r"test_latent_chunks\.py::test_chunk_attention_equals_its_reference\[chunks0-": "other chunks run",
    r"test_sort_rows\.py::test_the_kernel_gives_the_groups_and_the_bits_of_the_reference\[True-1-": (
        "9 tokens run, and one token in the kernel that adds"
    ),
    r"test_sort_rows\.py::test_the_kernel_that_adds_sorts_as_xla\[8-24": "other numbers of tokens run",
    r"test_larger_sorts\.py::test_for_the_h200_they_are_one_or_two_kernels_that_spill_nothing\[(512|128)-": (
        "64 and 2,048 tokens run"
    ),
    r"test_larger_sorts\.py::test_any_routing_has_the_places_of_the_reference\[sort_counted-False": (
        "the sort of held experts runs, and a block of many tokens"
    ),
    r"test_few_tokens\.py::test_it_equals_two_products_of_the_pairs\[1-4": "8 tokens run",
    r"test_int4_gemm\.py::test_for_the_h200_it_uses_its_units_and_spills_nothing\[64-": "8 and 32 rows run",
    r"test_fp8_gemm\.py::test_fp8_gemm_equals_its_reference\[kernel[23]-": "other shapes run",
    r"test_expert_int4\.py::test_each_row_is_multiplied_with_its_experts_weight\[one": (
        "rows of many experts run"
    ),
    r"test_swapped\.py::test_each_row_is_multiplied_with_its_experts_weight\[one": (
        "rows of many experts run"
    ),
    r"test_swapped\.py::test_few_registers_are_spilled_on_an_h200\[1-": "the largest tile runs",
    r"test_kernel_set\.py::test_the_kernels_take_what_the_family_gives_them\[opt": "gemma3 runs",
    r"test_rope_append\.py::test_rope_append_equals_its_reference\[(int8-3|float8_e4m3fn-[25]|bfloat16-5)-": (
        "other tokens run in each dtype"
    ),
    r"test_cpu_gemm\.py::test_products_equal_the_reference\[\w+-1-96-192-floats": ("7 and 64 columns run"),
    r"test_offload_io\.py::test_the_account_equals_the_allocated_bytes\[1-100": "few rows of values run",
    r"test_offload_io\.py::test_the_cost_model_counts_the_traffic\[kv3-": "other shares run",
    r"test_int4_experts\.py::test_experts_are_the_quantized_form_\w+\[2-False": "the other case runs",
    r"test_converted\.py::test_a_converted_checkpoint_loads_the_same_on_every_mesh\[tiny-qwen2": (
        "other families run"
    ),
    r"test_sampling\.py::test_one_row_that_asks_gets_\w+\[3": "4 rows run",
    r"test_kernels\.py::test_a_case_of_each_group_can_be_traced\[(decode|chunk)_attention_512": (
        "the groups of 128 columns run"
    ),
    r"test_kernels\.py::test_a_case_of_each_group_can_be_traced\[latent_prefill_16": "128 heads run",
    r"test_batch_replicas\.py::test_any_faults_lose_and_double_no_answer\[1": "other seeds run",
    r"test_data_parallel\.py::test_experts_take_the_rows_of_some_gathers": (
        "two nano-batches gather apart, and whole experts take the rows of all gathers"
    ),
    r"test_eplb\.py::test_goldens_of_small_steps": (
        "a small step's choice is tested by itself, and ranks run while experts move"
    ),
    r"test_offloaded_tokens\.py::test_drawn_policies": (
        "every order runs on all tiers, and drawn policies on four devices in test_offload_shards"
    ),
    r"test_lowered\.py::test_the_programs_of_all_kinds\w+\[tiny-mixtral-fp8": (
        "experts in mxfp4 run, and weights in 4 bits with an 8-bit cache"
    ),
    r"test_fp8_gemm\.py::test_for_the_h200_a_weight_in_blocks": (
        "the kernels without blocks are compiled, and grouped ones with blocks in test_block_fp8"
    ),
    r"test_chunk_attention\.py::test_heads_of_512_columns_spill": (
        "heads of 128 columns in e4m3 are compiled, and run with 512 in the interpreter"
    ),
    r"test_latent_decode\.py::test_decode_attention_equals_its_reference\[lengths[03]-": (
        "16 and 128 heads run, and other rows are cut or empty"
    ),
    r"test_mxfp4_rows\.py::test_the_kernel_of_any_rows_takes_blocks\[(plain|gates)": (
        "pairs of gates run, and other tiles read the same blocks"
    ),
    r"test_8_bits\.py::test_on_two_devices\[tiny-llama": (
        "an int8 cache runs on two devices, and test_fp8 compares weights on every mesh"
    ),
    r"test_peer_copy_profile\.py::test_of_other_numbers_of_devices\[4": (
        "two devices run, and test_known_orders swaps on four"
    ),
    r"test_measured_profile_search\.py::test_the_command_finds_two_nano_batches\[1024-512": (
        "another workload runs"
    ),
    r"test_kernels\.py::test_a_case_of_each_group_can_be_traced"
    r"\[(sparse_attention|decode_attention_triton)": (
        "the groups of dense attention run, and test_spans and test_triton run the kernels"
    ),
    r"test_draw_filtered\.py::test_the_kernel_draws_the_tokens_of_its_reference\[4612": (
        "a row alone is drawn as the reference draws it"
    ),
    r"test_swapped\.py::test_few_registers_are_spilled_on_an_h200\[2048-True-36": (
        "test_expert_mlp compiles two such products in e4m3"
    ),
    r"test_block_fp8\.py::test_on_an_h200_no_register_is_spilled\[qwen 2048": "other tiles are compiled",
    r"test_guessed_pages\.py::test_an_engine\w+\[good": (
        "the guesses are tested by themselves, and test_warm_starts serves after a wrong number of pages"
    ),
    r"test_warm_starts\.py::test_the_programs_are_read_before_there_are_weights\[stages": "one device runs",
    r"test_collective_bench\.py::test_a_profile_of_two_devices_is_continued": (
        "pairs of products and sums are measured, and test_step_joules continues a profile"
    ),
    r"test_noise_of_draws\.py::test_noise_in_the_logits_changes_few_draws\[filters1-64": (
        "draws without filters run, and test_sampling has the filters"
    ),
    r"test_sink_logits\.py::test_decode_attention_equals_its_reference\[None-lengths1-100": (
        "the kernel scales the sinks of whole groups in another test, and chunks meet sinks"
    ),
    r"test_goldens\.py::TestGoldens::test_one_request_at_a_time\[tiny-mistral": (
        "its window is that of tiny-gemma2; it differs from tiny-llama in nothing else"
    ),
    r"test_goldens\.py::TestGoldens::test_chunked_prefill\[1-tiny-gemma2": "chunks of 7 and 16 tokens run",
    r"test_spans\.py::test_heads_share_pages_and_a_table": (
        "heads with tables of their own run, and dense heads share a table"
    ),
    r"test_fp8_gemm\.py::test_a_weight_in_blocks_is_scaled\w+\[kernel2": "kernel 1 runs",
    r"test_decode_attention\.py::test_decode_attention_equals_its_reference\[lengths16-": (
        "pieces of one pair are listed by another test"
    ),
    r"test_decode_attention\.py::test_pieces_of_one_pair_spill": (
        "test_compiled_step compiles decode attention"
    ),
    r"test_converted\.py::test_a_converted_checkpoint_loads_the_same_on_every_mesh\[tiny-glm4": (
        "other families run"
    ),
    r"test_packed_int4\.py::test_the_logits_are_those_of_the_numbers_in_32_bits\[awq-1": (
        "GPTQ runs, and the numbers of AWQ are compared"
    ),
    r"test_top_k\.py::test_the_kernel_equals_its_reference\[32-4": "other sizes run",
    r"test_two_stage_search\.py::test_the_simulation_agrees_with_the_solver\[network-2-True": (
        "the case all-1 runs"
    ),
    r"test_latent_chunks\.py::test_chunk_attention_equals_its_reference\[chunks1-": "128 heads run",
    r"test_found_plans\.py::test_it_is_at_least_as_fast\w+\[(llama-3-70b-tp4-fp8|deepseek)": (
        "other devices and models run"
    ),
    r"test_issue_order\.py::test_found_plans_keep_apart\w+\[2-4": "another case runs",
    r"test_offload_scopes\.py::test_every_scope\w+\[tiny-llama-2": "tiny-gemma2 and tiny-mixtral run",
    r"test_timing\.py::test_the_tunes_loop_makes_every_product_in_every_round\[dense": (
        "flat products run in the loop"
    ),
    r"test_triton\.py::test_supported_heads_fit_the_shared_memory\[7": "two other cases run",
    r"test_grouped_gemm\.py::test_the_kernel_is_each_row_times": (
        "rows of biases and clamps run on the same kernel"
    ),
    r"test_lowered\.py::test_an_engine_of_kept_programs_draws": (
        "engines read what a process lowered, and warm starts read kept programs"
    ),
    r"test_compile\.py::test_a_later_start_compiles_nothing": (
        "warm starts read every program of a folder in test_warm_starts"
    ),
    r"test_kv_offload\.py::test_\w+\[windows-tp2": (
        "tiny-llama runs, and test_disk_engine has windows on two devices"
    ),
    r"test_disk_engine\.py::test_a_later_round_finds_its_pages_after_a_restart\[llama": (
        "windows on two devices run"
    ),
    r"test_known_orders\.py::test_what_is_found_is_not_behind": (
        "every known order is a plan, and test_measured_profile_search picks the best of them"
    ),
    r"test_chunk_attention\.py::test_rows_whose_scores_are_all_minus_infinity_become_0\[int8": (
        "rows outside the unified max value fall back, and decode attention has such rows"
    ),
    r"test_sampling\.py::test_frequencies\[kwargs1-of_few_blocks": (
        "the full sampler runs, and its blocks are compared with rows at once"
    ),
    r"test_demo\.py::test_demo_serves_asks_and_ends": (
        "test_command serves and asks as processes, and the demo ends with an error"
    ),
    r"test_skewed_experts\.py::test_a_report_of_ranks_whose_experts_move": (
        "experts move in test_eplb, and the other tests have the report's parts"
    ),
    r"test_layered_step\.py::test_a_deep_model_starts": "test_enforce_eager counts the programs of a start",
    r"test_attention_spans\.py::test_all_layers_make_their_work_lists": (
        "test_spans compares a stack of lists with each list"
    ),
    r"test_int4_weights\.py::test_a_forward_is_that_of_the_weights_read_back": (
        "test_int4_experts and test_packed_int4 compare logits"
    ),
    r"test_commands\.py::test_requests_that_fail_under_the_profiler": (
        "the throughput command runs, and failed requests are counted by themselves"
    ),
    r"test_data_parallel\.py::TestTheTokensOfOneDevice::test_for_every_kind_of_request_on_ranks_of_two": (
        "ranks of one device have every kind, and goldens run on ranks of two devices"
    ),
    r"test_offloaded_tokens\.py::test_windows_caps_and_post_norms": (
        "test_sparse_values attends to the windows of tiny-gemma2 on every tier"
    ),
    r"test_flat_gemm\.py::test_for_the_h200_it_uses_its_units": (
        "test_pdl compiles the kernel, and test_fp8_gemm reads the registers of the wider one"
    ),
    r"test_peer_copy_profile\.py::test_the_command": "test_known_orders runs the command with copied sums",
    r"test_data_parallel\.py::test_goldens_of_ranks_of_two_devices": (
        "whole experts run on such ranks, and experts move between them in test_eplb"
    ),
    r"test_expert_load\.py::test_all_forms_of_a_step_count_alike": (
        "a step's counts are those of a loop, and test_data_parallel adds the counts of ranks"
    ),
    r"test_compiler\.py::test_drawn_plans_compiled": (
        "plans are drawn and run op by op, and test_exchange and test_scattered compile plans"
    ),
    r"test_attention_spans\.py::test_a_forward_with_groups_of_heads": (
        "heads with spans are compared with the definition at any chunking"
    ),
    r"test_8_bits\.py::test_from_cached_pages": (
        "pages are shared in the goldens with a warm prefix cache, whatever their dtype"
    ),
    r"test_int4_experts\.py::test_the_logits_are_those_of_the_numbers\[float32": (
        "the numbers of experts are compared, and test_packed_int4 compares logits"
    ),
    r"test_offloaded_tokens\.py::test_opt_on_all_tiers_in_every_order\[attends on the host": (
        "every order runs on two devices in test_offload_shards"
    ),
    r"test_chunk_attention\.py::test_chunk_attention_equals_its_reference\[chunks6-": (
        "decode attention runs heads of 512 columns, and chunks in e4m3 and int8 run"
    ),
    r"test_expert_mlp\.py::test_(no_registers_are_spilled_in_bfloat16|it_equals_two_products_in_bfloat16)": (
        "test_few_tokens compiles and runs experts in bfloat16"
    ),
    r"test_latent_decode\.py::test_decode_attention_equals_its_reference\[lengths4-": "other scales run",
    r"test_mxfp4_rows\.py::test_each_row_is_multiplied_with_its_experts_weight\[two tiles": "other tiles run",
    r"test_route\.py::test_the_kernel_equals_its_reference\[9-128": (
        "the kernel that sorts is compared, too, and test_one_router compares layers with biases"
    ),
    r"test_sort_rows\.py::test_the_kernel_that_adds_sorts_as_xla\[1-128": (
        "a device that holds some of the experts runs"
    ),
    r"test_plans_bench\.py::test_the_command": (
        "its parts are tested by themselves, and other commands measure plans"
    ),
    r"test_kernels\.py::test_a_case_of_each_group_can_be_traced\[rope_append": (
        "the other groups are traced, and test_rope_append runs the kernel"
    ),
    r"test_fp8_gemm\.py::test_values_and_scales_pass_\w+\[fp8_gemm": (
        "dense and grouped kernels fit a stream region"
    ),
    r"test_two_stage_search\.py::test_an_op_may_leave_out_a_cut": (
        "test_op_cuts cuts each op where it is shortest"
    ),
    r"test_layered_step\.py::test_goldens": (
        "test_enforce_eager compares layered steps with those of one program, and test_goldens runs them"
    ),
    r"test_expert_parallel\.py::test_goldens": (
        "experts are spread over devices in test_eplb, and layers are compared in test_exchanged_experts"
    ),
}


def mark(items: list[pytest.Item]) -> set[str]:
    """Mark the items that a pattern matches as `slow`. Return the patterns without an item."""
    unmatched = set(SLOW_CASES)
    of_file = collections.defaultdict(list)
    for pattern, reason in SLOW_CASES.items():
        of_file[pattern.partition(r"\.py::")[0] + ".py"].append((pattern, reason))
    for item in items:
        name = item.path.name + item.nodeid[item.nodeid.index("::") :]
        for pattern, reason in of_file[item.path.name]:
            if re.match(pattern, name):
                item.add_marker(pytest.mark.slow(reason=reason))
                unmatched.discard(pattern)
    return unmatched
