-- What the server logged of each counter, step by step, beside what it should have logged.
--
-- A step is an event "Job [un]assigned … Instance blocks: N/M busy", and busy is N. computed_from is N
-- without the job's own change: what the server had read. expected is the number before, with that change.
--   ok         computed_from is the number before.
--   collision  it is an older one, of the last minute: a stale read, by which the counter went off_by wrong.
--   unknown    the log does not tell. It begins here, or has a gap, or a repair or the triggers set the
--              counter meanwhile, or a stale read was more than a minute old: note says what is known.
-- truth is the sum over the attached jobs after the step, counted back from those attached now; it is NULL
-- where that cannot be known. With triggers or without, the server logs its own arithmetic: busy is what it
-- believed. `counter now` is the counter itself, compared with the last number logged. day_: totals of the
-- instance and day (UTC); day_off_by is over the collisions whose amount is known, day_unknown counts the
-- unknown steps and amounts.
--
-- Order:  recorded_at, which lies between the read and the commit: who read a number comes after who logged
--         it, as far as the servers' clocks agree. Ids are random. At equal times any order may be the right
--         one, and a collision is only what is one in each of them: a number read twice or reached twice.
-- Blocks: the integer at offer.blocks of what job_runtime_data holds now, 1 where there is none. In any other
--         text, and for a job that is gone, they are unknown: then it is a collision only if no job of one
--         block or more explains the number, within a minute of the one before.
-- Guards: nothing; a plain SELECT that needs none of our objects.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one pass over events, event_targets and jobs with one parse per job; sorts of the steps.
WITH job_blocks AS (
    SELECT
        id,
        instance_id,
        CASE
            WHEN job_runtime_data IS NULL THEN 1
            WHEN NOT json_valid(job_runtime_data) THEN NULL
            WHEN json_type(job_runtime_data, '$.offer.blocks') IS NULL THEN 1
            WHEN json_type(job_runtime_data, '$.offer.blocks') <> 'integer' THEN NULL
            WHEN json_extract(job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
                THEN json_extract(job_runtime_data, '$.offer.blocks')
        END AS blocks
    FROM jobs
),

story AS (
    SELECT
        events.recorded_at,
        on_instance.entity_id AS instance_id,
        on_instance.entity_name AS instance,
        on_job.entity_id AS job_id,
        on_job.entity_name AS job,
        job_blocks.blocks,
        round((julianday(substr(events.recorded_at, 1, 19)) - 2440587.5) * 86400)
        + cast(substr(events.recorded_at, 20) AS real) AS clock,
        CASE WHEN events.message GLOB 'Job assigned*' THEN 'assigned' ELSE 'unassigned' END AS step,
        CASE WHEN events.message GLOB 'Job assigned*' THEN 1 ELSE -1 END AS direction,
        cast(substr(events.message, instr(events.message, 'blocks: ') + 8) AS integer) AS busy
    FROM events
    INNER JOIN event_targets AS on_instance
        ON events.id = on_instance.event_id AND on_instance.entity_type = 'INSTANCE'
    LEFT JOIN event_targets AS on_job ON events.id = on_job.event_id AND on_job.entity_type = 'JOB'
    LEFT JOIN job_blocks ON on_job.entity_id = job_blocks.id
    WHERE
        events.message GLOB 'Job assigned to instance. Instance blocks: [-0-9]*/*'
        OR events.message GLOB 'Job unassigned from instance. Instance blocks: [-0-9]*/*'
    UNION ALL
    -- The counter itself, after all steps.
    SELECT
        NULL AS recorded_at,
        instances.id AS instance_id,
        instances.name AS instance,
        NULL AS job_id,
        NULL AS job,
        CASE WHEN count(job_blocks.id) = count(job_blocks.blocks) THEN coalesce(sum(job_blocks.blocks), 0) END
            AS blocks,
        1000000000000 AS clock,
        'counter now' AS step,
        0 AS direction,
        instances.busy_blocks AS busy
    FROM instances
    LEFT JOIN job_blocks ON instances.id = job_blocks.instance_id
    GROUP BY instances.id, instances.name, instances.busy_blocks
),

steps AS (
    SELECT
        *,
        direction * blocks AS delta,
        busy - direction * blocks AS computed_from,
        count(*) OVER moment > 1 AS tied,
        min(busy) OVER moment = max(busy) OVER moment AS clear,
        min(direction) OVER moment = max(direction) OVER moment AS one_way
    FROM story
    WINDOW moment AS (PARTITION BY instance_id, clock)
),

placed AS (
    SELECT
        *,
        lag(busy) OVER so_far AS last_busy,
        lag(clock) OVER so_far AS last_clock,
        clear AND lag(clear) OVER so_far AS certain,
        one_way AND (
            row_number() OVER (same_number ORDER BY direction * computed_from NULLS LAST, job_id) > 1
            OR row_number() OVER (same_read ORDER BY direction * busy, job_id) > 1 AND blocks IS NOT NULL
        ) AS repeated,
        ' ' || group_concat(busy || ' ' || coalesce(computed_from, ''), ' ') OVER lately || ' ' AS lately,
        CASE
            WHEN count(*) OVER whole = count(delta) OVER whole
                THEN
                    max(CASE WHEN direction = 0 THEN blocks END) OVER whole
                    - coalesce(sum(delta) OVER later, 0)
        END AS truth
    FROM steps
    WINDOW
        whole AS (PARTITION BY instance_id),
        same_number AS (PARTITION BY instance_id, clock, busy),
        same_read AS (PARTITION BY instance_id, clock, computed_from),
        so_far AS (
            PARTITION BY instance_id
            ORDER BY clock, direction * busy, direction * computed_from NULLS LAST, job_id
        ),
        lately AS (
            PARTITION BY instance_id ORDER BY clock RANGE BETWEEN 60 PRECEDING AND 0.0000005 PRECEDING
        ),
        later AS (
            PARTITION BY instance_id ORDER BY clock
            RANGE BETWEEN 0.0000005 FOLLOWING AND UNBOUNDED FOLLOWING
        )
),

judged AS (
    SELECT
        *,
        CASE
            WHEN computed_from = last_busy THEN 'ok'
            WHEN last_busy IS NULL OR direction = 0 THEN 'unknown'
            WHEN tied AND repeated THEN 'collision'
            WHEN tied OR NOT certain THEN 'unknown'
            WHEN instr(lately, ' ' || computed_from || ' ') > 0 THEN 'collision'
            WHEN
                blocks IS NULL AND clock - last_clock <= 60 AND direction * (busy - last_busy) <= 0
                THEN 'collision'
            ELSE 'unknown'
        END AS verdict,
        CASE WHEN certain OR computed_from = last_busy THEN last_busy + delta END AS expected,
        CASE WHEN certain OR computed_from = last_busy THEN computed_from - last_busy END AS off_by
    FROM placed
    WHERE direction <> 0 OR last_busy IS NOT NULL
)

SELECT
    instance,
    instance_id,
    recorded_at,
    step,
    job,
    job_id,
    blocks,
    computed_from,
    busy,
    expected,
    off_by,
    truth,
    verdict,
    CASE
        WHEN verdict = 'ok' THEN NULL
        WHEN direction = 0 THEN 'the last number was not stored, or the counter was changed since'
        WHEN last_busy IS NULL THEN 'the log begins here'
        WHEN blocks IS NULL AND verdict = 'collision' THEN 'blocks unknown, but one or more cannot explain it'
        WHEN blocks IS NULL THEN 'blocks unknown'
        WHEN verdict = 'collision' AND off_by IS NULL THEN 'stale read; equal times, amount unknown'
        WHEN verdict = 'collision' THEN 'stale read'
        WHEN tied OR NOT certain THEN 'equal times, order unknown'
        ELSE 'computed_from is not in the log of the minute before'
    END AS note,
    count(CASE WHEN verdict = 'collision' THEN 1 END) OVER day AS day_collisions,
    sum(CASE WHEN verdict = 'collision' THEN off_by ELSE 0 END) OVER day AS day_off_by,
    count(CASE WHEN verdict = 'unknown' OR off_by IS NULL THEN 1 END) OVER day AS day_unknown
FROM judged
WINDOW day AS (PARTITION BY instance_id, date(recorded_at))
ORDER BY instance, instance_id, clock, direction * busy, direction * computed_from NULLS LAST, job_id
