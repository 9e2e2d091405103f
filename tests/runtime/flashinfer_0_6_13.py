"""The names of flashinfer 0.6.13's arguments, in their order: what it is called with must bind to these."""

from __future__ import annotations

from typing import Any


class Decode:
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = None,
        use_cuda_graph: Any = None,
        use_tensor_cores: Any = None,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: Any = None,
        jit_args: Any = None,
    ) -> None: ...

    def reset_workspace_buffer(
        self,
        float_workspace_buffer: Any,
        int_workspace_buffer: Any,
    ) -> None: ...

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        page_size: Any,
        pos_encoding_mode: Any = None,
        window_left: Any = None,
        logits_soft_cap: Any = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        non_blocking: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = None,
        q_len_per_req: Any = None,
    ) -> None: ...

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = None,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        q_len_per_req: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
    ) -> None: ...


class Prefill:
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = None,
        use_cuda_graph: Any = None,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = None,
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None: ...

    def reset_workspace_buffer(
        self,
        float_workspace_buffer: Any,
        int_workspace_buffer: Any,
    ) -> None: ...

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = None,
        pos_encoding_mode: Any = None,
        use_fp16_qk_reduction: Any = None,
        sm_scale: Any = None,
        window_left: Any = None,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = None,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = None,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = None,
    ) -> None: ...

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = None,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
    ) -> None: ...
