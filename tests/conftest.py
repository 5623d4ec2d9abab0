"""Options of the test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected texts in tests/golden from what the code says now",
    )
