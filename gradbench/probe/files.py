"""What a recording leaves in the folder of its attempt.

<attempt>/trace.<n>.csv     what the sampler of the attempt's n-th process read, a line a sample
<attempt>/phases.<n>.csv    which phase that process was in, and when
<attempt>/trace.parquet     all of it as one table, once the attempt has ended; the others are gone then
"""

SAMPLES, PHASES, TABLE = "trace.{}.csv", "phases.{}.csv", "trace.parquet"
