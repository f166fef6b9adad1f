"""Run folders -> tables, pages, cards. Never imports torch."""
