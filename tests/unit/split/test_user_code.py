"""Messages name the user's line."""

from contextlib import ExitStack

from lightning_pipeline.model.tensors import user_line


def test_the_line_is_the_users_and_not_of_the_library_that_calls_back() -> None:
    found: list[str] = []
    with ExitStack() as stack:
        stack.callback(
            exec,
            "found.append(user_line())",
            {"__name__": "contextlib", "found": found, "user_line": user_line},
        )
    assert found[0].startswith("test_user_code.py:")
    assert found[0].endswith(" in test_the_line_is_the_users_and_not_of_the_library_that_calls_back")
