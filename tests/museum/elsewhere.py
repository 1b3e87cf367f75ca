"""Cases whose test stood before the museum was built: where each of them is."""

ELSEWHERE = {
    "K039": "tests/pools/test_prefix_hazards.py::test_hole_in_a_host_chain",
    "K051": "tests/runtime/test_transfer.py::test_a_late_writer_keeps_both_ends_until_it_returns",
    "K083": "tests/runtime/test_exactness.py::test_answers_equal_cold_runs_bit_for_bit",
    "K101": "tests/runtime/test_gate.py::test_a_bad_load_is_recomputed_and_counted_never_read",
    "K141": "tests/protocols/test_grants.py::test_a_stale_writer_is_refused",
    "K153": "tests/runtime/test_loader.py::test_finishing_just_before_the_deadline_is_not_late",
    "K159": "tests/runtime/test_engine.py::test_an_engine_that_cannot_go_on_ends_its_requests",
    "K203": "tests/protocols/test_schema.py::test_every_identity_field_splits_the_tree",
    "K227": "tests/pools/test_prefix_hazards.py::test_cut_back_to_the_deepest_tail",
}
