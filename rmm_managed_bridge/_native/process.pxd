from libc.stddef cimport ptrdiff_t, size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "cuda.h" nogil:
    ctypedef struct CUstream_st:
        pass
    ctypedef CUstream_st* CUstream


cdef extern from "pool/tracked_pool.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass HolderKey:
        uint32_t site
        uint32_t tag
        int device
        uint8_t framework
        uint8_t kind

    cdef cppclass CUsage "rmm_bridge::Usage":
        int64_t current_bytes
        int64_t current_count
        int64_t peak_bytes
        int64_t total_bytes
        int64_t total_count
        int64_t at_peak_bytes
        int64_t at_peak_count

    cdef cppclass Entry:
        uintptr_t ptr
        uint64_t bytes
        uint64_t serial
        uint64_t stream
        int64_t time_ns
        uint32_t thread
        uint32_t holder
        uint32_t resized_count

    cdef enum class Action(uint8_t):
        allocate

    cdef cppclass HistoryEvent:
        Action action
        HolderKey who
        Entry entry
        uint64_t stated_bytes

    cdef cppclass CDriver "rmm_bridge::Driver":
        bool loaded
        int devices
        string why_not
        void load(const char* library)
        int attribute(int device, int which)
        size_t total_memory()
        int device_memory(size_t* size_bytes, int device)

    cdef cppclass CHistory "rmm_bridge::History":
        void set_limit(size_t limit) except +
        vector[HistoryEvent] copy(uint64_t& dropped) except +

    cdef enum class WarningKind "rmm_bridge::PendingWarning::Kind"(int):
        quarantine_full

    cdef cppclass CWarning "rmm_bridge::PendingWarning":
        WarningKind kind
        size_t bytes
        ptrdiff_t offset
        HolderKey who
        Entry entry

    cdef cppclass CWarnings "rmm_bridge::PendingWarnings":
        vector[CWarning] take()
        uint64_t damaged_count()

    cdef cppclass CBudget "rmm_bridge::Budget":
        CBudget* outer
        int64_t limit_bytes
        int64_t live_bytes

    cdef cppclass CBudgets "rmm_bridge::Budgets":
        CBudget* find(uint32_t tag)

    ctypedef int (*Madvise "rmm_bridge::HugepageAdvice::Function")(void*, size_t, int) noexcept

    cdef cppclass HugepageAdvice:
        int64_t advised_bytes
        uint64_t calls
        uint64_t failures
        void ask_instead(Madvise function)

    cdef cppclass BackgroundThread "rmm_bridge::BackgroundThread":
        bool wake()

    cdef enum class LimitedBy "rmm_bridge::MemoryLimits::Who"(int):
        nobody
        group
        address_space
        data_segment

    cdef cppclass CLimit "rmm_bridge::MemoryLimits::Limit":
        uint64_t bytes
        LimitedBy who
        string file

    cdef cppclass CPressure "rmm_bridge::MemoryLimits::Pressure":
        uint64_t excess_bytes
        bool near

    cdef cppclass CLimits "rmm_bridge::MemoryLimits":
        void find(const string& proc, const string& groups) except +
        CLimit smallest() except +
        bool limited()
        size_t processors()
        CPressure look()

    cdef cppclass CForks "rmm_bridge::ForkState":
        uint64_t count
        uint64_t bytes
        uint64_t copied_bytes
        uint64_t time_ns

    cdef cppclass CLedger "rmm_bridge::Ledger":
        bool read(uint32_t id, Entry& out)
        HolderKey key_of(uint32_t holder)
        int64_t current_bytes()
        int64_t peak_bytes()
        void reset_peak()
        int open_scope()
        int64_t read_scope(int scope)
        void close_scope(int scope)
        size_t overhead_bytes()

    cdef cppclass SiteText "rmm_bridge::Text":
        pass

    cdef cppclass SiteTexts "rmm_bridge::Sites::Site":
        SiteText file
        SiteText function
        int line
        bint library
        uint32_t via

    cdef cppclass CSites "rmm_bridge::Sites":
        SiteTexts at(uint32_t id)
        size_t overhead_bytes()

    cdef enum class TextKind(uint32_t):
        tag
        framework
        about

    cdef cppclass RecordingShape "rmm_bridge::Recording::Shape":
        uint64_t event_count
        uint64_t block_count
        uint64_t text_bytes

    cdef cppclass CRecording "rmm_bridge::Recording":
        void name(TextKind kind, uint32_t number, uint32_t outer, const string& text)

    cdef cppclass AtomicRecording "std::atomic<rmm_bridge::Recording*>":
        CRecording* load()

    cdef enum class Phase(int):
        running
        forked
        exiting

    cdef cppclass CProcess "rmm_bridge::Process":
        CProcess() except +
        CLedger ledger
        CSites sites
        CBudgets budgets
        CWarnings warnings
        CHistory history
        AtomicRecording recording
        CDriver driver
        HugepageAdvice hugepages
        BackgroundThread background
        CLimits limits
        CForks forks
        bool running()
        bool is_child()
        bool parent_had_driver()
        void begin_again()
        int phase_number()
        uint64_t foreign_free_count()
        uint64_t size_mismatch_count()
        uint64_t failure_count()
        uint64_t given_back_count()
        uint64_t beyond_budget_count()
        uint64_t populated_count()
        uint64_t populated_byte_count()
        void record_all_events(bool on)
        void begin_recording(CRecording* file)
        void end_recording()
        bool add_budget(uint32_t tag, uint32_t outer, int64_t limit_bytes) except +

    cdef enum class Refusal(int):
        none
        out_of_memory
        capturing
        bad_stream
        other_device
        over_budget
        timed_out
        host_function
        unheld_stream

    cdef enum class Track(int):
        off
        counters
        sites

    cdef enum class Side(uint8_t):
        cpu
        gpu

    cdef enum class Freed(int):
        done
        foreign
        not_live
        ignored

    cdef cppclass Provenance:
        uint32_t site
        uint32_t tag
        uint8_t framework

    cdef cppclass Request:
        size_t bytes
        size_t alignment
        Side side
        bool host_ordered
        bool may_collect
        CUstream stream
        Provenance who

    cdef cppclass PoolNumbers:
        size_t reserved_bytes
        size_t used_bytes
        size_t quarantined_bytes
        size_t largest_free_bytes
        size_t lane_count
        size_t slab_free_bytes
        size_t pinned_bytes

    cdef cppclass Milliseconds "std::chrono::milliseconds":
        Milliseconds()
        Milliseconds(int64_t count)

    cdef cppclass PoolOptions:
        size_t limit_bytes
        size_t release_threshold_bytes
        size_t quarantine_limit_bytes
        Milliseconds patience
        Milliseconds wait_timeout
        bool cautious
        bool debug
        bool budget
        size_t least_budget_bytes
        bool populate
        size_t spare_bytes
        Milliseconds recent
        bool hugepages
        bool device_wait

    cdef cppclass Stalled "rmm_bridge::Pool::Stalled":
        CUstream stream
        const char* block
        size_t bytes

    cdef cppclass CPool "rmm_bridge::TrackedPool":
        Stalled stalled()
        int other_device(CUstream stream)
        void* allocate(const Request& request, Refusal& refusal, bool* zeroed, bool* held) noexcept
        PoolNumbers numbers() except +
        const PoolOptions& options()
        size_t live_count()
        size_t live_bytes()
        size_t trim() except +
        bool close() except +
        bool poll() except +
        Refusal synchronize_all() except +
        void retire()
        bool retired()
        bool inherited()
        bool over()
        int device()
        uint8_t kind()
        string refused_by() except +
        Track track()
        bool prefetches_new(size_t size_bytes)
        void prefetch_new(void* ptr, size_t size_bytes, CUstream stream)


cdef extern from "entry/device_pools.hpp" namespace "rmm_bridge" nogil:
    const int kDevices

    cdef cppclass AtomicPool "std::atomic<rmm_bridge::TrackedPool*>":
        void store(CPool* pool)
        CPool* load()

    cdef cppclass DevicePools:
        AtomicPool& operator[](size_t device)


cdef extern from "entry/call_site.hpp" namespace "rmm_bridge":
    cdef cppclass Origin:
        bool tags_used
        Provenance capture(uint8_t framework, Track track) noexcept


cdef CProcess* process
cdef Origin* origin
cdef uint8_t framework_number(str name) except? 255
