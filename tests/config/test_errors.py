from instar.config.errors import ConfigError, ConfigProblem, InstarError, SourceLocation


def test_a_problem_reads_place_message_hint_then_excerpt() -> None:
    place = SourceLocation("x.yaml", 1, 1, "a: 2")
    problem = ConfigProblem((), "unknown key 'a'", "did you mean 'b'?", place)
    assert str(problem) == ("x.yaml:1:1: unknown key 'a'; did you mean 'b'?\n  1 | a: 2\n    | ^")


def test_what_is_left_out_leaves_no_gap() -> None:
    assert str(ConfigProblem((), "the disk is full")) == "the disk is full"


def test_an_error_lists_all_its_problems_and_counts_them() -> None:
    error = ConfigError(ConfigProblem((), "one"), ConfigProblem((), "two"))
    assert str(error) == "one\ntwo\n2 errors. Nothing was started."


def test_one_builds_an_error_of_one_problem() -> None:
    error = ConfigError.of("too short", where="data.path", hint="prepare more text")
    assert error.problems == (
        ConfigProblem((), "too short", "prepare more text", place="data.path"),
    )
    assert str(error) == ("data.path: too short; prepare more text\n1 error. Nothing was started.")


def test_the_last_line_names_the_section_whose_keys_help() -> None:
    nested = ConfigError.of("bad", key="parallel.ddp.static_graph")
    top = ConfigError.of("bad", key="seed")
    in_list = ConfigError.of("bad", key="schedule[3].when.waited")
    assert str(nested).endswith("Keys: instar config schema parallel.ddp")
    assert str(top).endswith("Keys: instar config schema")
    assert str(in_list).endswith("Keys: instar config schema schedule")


def test_exit_codes() -> None:
    assert ConfigError.of("bad").exit_code == 2
    assert InstarError("worse").exit_code == 4
    assert isinstance(ConfigError.of("bad"), InstarError)
