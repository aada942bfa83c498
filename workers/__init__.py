"""Who does the work: workers, worker groups, the scheduler and the model runtime. No HTTP and no database here."""
