// SPDX-License-Identifier: Apache-2.0
// Exercises the native core under sanitizers, without Python. A seed determines a random mix of all
// operations of the engine on real rings and files. Exits with 1 on failure.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <cerrno>

#include "copies/cuda.h"
#include "lanes/engine.h"
#include "lanes/ring.h"

using namespace nvmeof;

namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

constexpr size_t kPayload = 50'000;
constexpr size_t kSlot = kHeaderBytes + (kPayload + kPageBytes - 1) / kPageBytes * kPageBytes;
constexpr unsigned kTargets = 2;
constexpr unsigned kPoolSlots = 48;
constexpr unsigned kStagingSlots = 24;
constexpr unsigned kLogPages = 4;

const Region kRegion{{1, 2, 3}, 7};
// The regions of other engines, all in the same files. The first one is the region of the slots.
constexpr std::array<Region, 2> kForeign{kRegion, Region{{1, 2, 9}, 7}};
const Stamp kStamp{3, {4, 5, 6}};

Identity identity(uint64_t number, uint64_t generation) {
  Identity made;
  made.key_bytes = 36;
  std::memcpy(made.key.data(), &number, sizeof number);
  made.key[35] = 1;
  made.generation = generation;
  return made;
}

// Slabs, tables and staging of one engine. Slabs are buffered if the file system has no O_DIRECT.
struct Site {
  std::vector<Target> targets;
  std::byte* memory;

  explicit Site(const std::string& directory) {
    for (unsigned i = 0; i < kTargets; ++i) {
      const std::string base = directory + "/" + std::to_string(i);
      int slab = open((base + ".slab").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
      if (slab < 0) slab = open((base + ".slab").c_str(), O_RDWR | O_CREAT, 0600);
      const int table = open((base + ".table").c_str(), O_RDWR | O_CREAT, 0600);
      const int log = open((base + ".log").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
      CHECK(slab >= 0 && table >= 0 && log >= 0);
      CHECK(ftruncate(slab, kPoolSlots / kTargets * kSlot) == 0);
      targets.push_back({slab, table, log});
    }
    void* mapped = mmap(nullptr, kStagingSlots * kSlot, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(mapped != MAP_FAILED);
    memory = static_cast<std::byte*>(mapped);
  }
  // Reopen the same files. The new descriptors stay open until the destructor.
  Target reopened(size_t index) {
    const Target& old = targets[index];
    targets.push_back({dup(old.slab_fd), dup(old.table_fd), dup(old.log_fd)});
    CHECK(targets.back().slab_fd >= 0 && targets.back().table_fd >= 0);
    CHECK(targets.back().log_fd >= 0);
    return targets.back();
  }
  ~Site() {
    for (const Target& target : targets) {
      close(target.slab_fd);
      close(target.table_fd);
      close(target.log_fd);
    }
    munmap(memory, kStagingSlots * kSlot);
  }

  // threads: per target; 0 for io_uring.
  EngineSetup setup(bool registered, std::shared_ptr<StartGate> gate = nullptr,
                    size_t threads = 0) const {
    EngineSetup made;
    made.targets = {targets.begin(), targets.begin() + kTargets};
    made.regions.assign(kTargets, kRegion);
    made.logs.assign(kTargets, {kLogPages, kLogPages, 0});
    made.groups = {{0, 0}};
    made.limits.slot_bytes = kSlot;
    made.limits.split_bytes = 16 << 10;
    made.limits.depth = 8;
    made.memory = {memory, kStagingSlots * kSlot};
    made.registered = registered;
    made.threads = threads;
    made.operations_max = 64;
    made.gate = std::move(gate);
    return made;
  }
  std::byte* slot(unsigned number) const { return memory + number * kSlot; }
  uint64_t address(unsigned number) const { return reinterpret_cast<uint64_t>(slot(number)); }
};

// The content of a slot: 0 to kPayload bytes generated from the two numbers.
struct Content {
  uint64_t number = 0, generation = 0;
  size_t bytes = kPayload;
};

void fill(std::byte* slot, const Content& content) {
  std::mt19937_64 dice(content.number * 1'000'003 + content.generation);
  for (size_t at = 0; at < content.bytes; at += sizeof(uint64_t)) {
    const uint64_t word = dice();
    std::memcpy(slot + kHeaderBytes + at, &word, std::min(sizeof word, content.bytes - at));
  }
}

bool holds(const std::byte* slot, const Content& content) {
  std::vector<std::byte> wanted(kSlot);
  fill(wanted.data(), content);
  return std::memcmp(slot + kHeaderBytes, wanted.data() + kHeaderBytes, content.bytes) == 0;
}

uint32_t payload_crc(const std::byte* slot, size_t bytes) {
  return crc32c(slot + kHeaderBytes, bytes);
}

std::vector<LaneEnd> wait(Engine& engine) {
  pollfd readable{engine.fd(), POLLIN, 0};
  CHECK(poll(&readable, 1, 20'000) == 1);
  return engine.poll();
}

// Check that joined CRCs of any parts of a message, and that of its copy, equal the message's CRC.
void test_crc_of_parts(uint64_t seed) {
  std::mt19937_64 dice(seed);
  for (int round = 0; round < 300; ++round) {
    const size_t bytes = dice() % (round % 10 == 0 ? 3'000'000 : 5'000);
    std::vector<std::byte> message(bytes);
    for (std::byte& byte : message) byte = static_cast<std::byte>(dice());
    const uint32_t whole = crc32c(message.data(), bytes);
    for (const CrcVariant& one : crc_variants()) CHECK(one.crc(message.data(), bytes) == whole);
    if (round % 10 == 0) CHECK(choose_crc(message) != nullptr);
    std::vector<size_t> cuts{0, bytes};
    for (uint64_t more = dice() % 20; more > 0; --more) cuts.push_back(dice() % (bytes + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), dice);
    uint32_t joined = 0;
    for (const size_t part : order) {
      const uint32_t crc = crc32c(message.data() + cuts[part], cuts[part + 1] - cuts[part]);
      joined ^= crc_share(crc, bytes - cuts[part + 1]);
    }
    CHECK(joined == whole);
    const size_t apart = dice() % 100;  // neither side is aligned
    std::vector<std::byte> copied(bytes + apart + 1, std::byte{0x5A});
    uint32_t crc = 0;
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      crc = copy_crc32c(copied.data() + apart + cuts[i], message.data() + cuts[i],
                        cuts[i + 1] - cuts[i], crc);
    CHECK(crc == whole);
    CHECK(std::equal(message.begin(), message.end(), copied.data() + apart));
    CHECK(copied.back() == std::byte{0x5A});
    std::fill(copied.begin(), copied.end(), std::byte{0x5A});
    crc = 0;
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      crc = copy_crc32c_at_target(copied.data() + apart + cuts[i], message.data() + cuts[i],
                                  cuts[i + 1] - cuts[i], crc);
    CHECK(crc == whole);
    CHECK(std::equal(message.begin(), message.end(), copied.data() + apart));
    CHECK(copied.back() == std::byte{0x5A});
  }
}

// Join parts as the GPU reports them: a part's CRC, without the inversions, is the XOR of 32 words.
void test_join_crcs(uint64_t seed) {
  std::mt19937_64 dice(seed);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::byte> message;
    std::vector<uint32_t> words;
    std::vector<uint64_t> sizes;
    for (uint64_t part = dice() % 6; part > 0; --part) {
      sizes.push_back(512 * (1 + dice() % 130));
      const size_t begin = message.size();
      for (uint64_t i = 0; i < sizes.back(); ++i) message.push_back(static_cast<std::byte>(dice()));
      const std::vector<std::byte> zeros(sizes.back());
      uint32_t crc = crc32c(message.data() + begin, sizes.back()) ^
                     crc32c(zeros.data(), zeros.size());  // the inversions cancel
      for (int lane = 1; lane < 32; ++lane) {
        words.push_back(static_cast<uint32_t>(dice()));
        crc ^= words.back();
      }
      words.push_back(crc);
    }
    const uint32_t whole = crc32c(message.data(), message.size());
    CHECK(join_crcs(words.data(), sizes.data(), sizes.size()) == whole);
    if (!words.empty()) {
      words[dice() % words.size()] ^= 1;
      CHECK(join_crcs(words.data(), sizes.data(), sizes.size()) != whole);
    }
  }
}

// Check that a log consists of intact pages, in which each record is valid only at its own
// position. Returns the sequence of the newest page, and counts the records by kind.
uint64_t check_log(int fd, std::map<LogKind, uint64_t>& kinds) {
  uint64_t newest = 0;
  std::vector<std::byte> page(kLogPageBytes);
  for (unsigned position = 0; position < kLogPages; ++position) {
    const ssize_t done =
        pread(fd, page.data(), page.size(), static_cast<off_t>(position * kLogPageBytes));
    CHECK(done >= 0);
    if (static_cast<size_t>(done) < kLogHeadBytes) continue;
    LogHead head;
    if (!decode_head(page.data(), head)) {
      CHECK(std::all_of(page.begin(), page.begin() + kLogHeadBytes,
                        [](std::byte byte) { return byte == std::byte{0}; }));
      continue;
    }
    CHECK(head.sequence % kLogPages == position && head.records > 0);
    newest = std::max(newest, uint64_t{head.sequence});  // a copy, because `head` is packed
    for (uint32_t index = 0; index < head.records; ++index) {
      const std::byte* const at = page.data() + kLogHeadBytes + index * kLogRecordBytes;
      LogRecord record;
      CHECK(!decode_record(at, head.sequence + 1, index, record));
      CHECK(!decode_record(at, head.sequence, index + 1, record));
      CHECK(decode_record(at, head.sequence, index, record));
      ++kinds[record.kind];
    }
  }
  return newest;
}

// Submits random operations, and checks that each ends once unless it is withdrawn.
struct Mixer {
  struct Under {
    LaneOp request;
    Place place;  // our place with the same slot
    unsigned staging;
    Content content;
    bool foreign = false;  // a read with another length or of another region
    bool attached = true;  // whether the lanes had the engine's files
    bool wanted = true;
  };
  Site& site;
  Engine& engine;
  std::mt19937_64 dice;
  std::map<uint64_t, Under> under;
  std::set<unsigned> free_staging;
  std::set<Place> busy;
  std::map<Place, Content> stored;
  std::set<std::pair<uint16_t, size_t>> attached;  // engines and targets
  bool closing = false;
  uint64_t token = 0, ok = 0, late = 0, withdrawn = 0, stale = 0, without_files = 0;

  Mixer(Site& at, Engine& driven, uint64_t seed) : site(at), engine(driven), dice(seed) {
    for (unsigned i = 0; i < kStagingSlots; ++i) free_staging.insert(i);
  }

  void submit_one() {
    const uint64_t number = dice() % kPoolSlots;
    const Place place = place_of(number % kTargets, static_cast<uint32_t>(number / kTargets));
    if (free_staging.empty() || busy.contains(place)) return;
    Under one{};
    one.staging = *free_staging.begin();
    const auto found = stored.find(place);
    const bool read = found != stored.end() && dice() % 2 == 0;
    one.content = read ? found->second : Content{dice(), dice(), dice() % (kPayload + 1)};
    one.foreign = read && dice() % 8 == 0;
    if (one.foreign) one.content.bytes = (one.content.bytes + 1 + dice() % kPayload) % kPayload;
    one.foreign = one.foreign && one.content.bytes != found->second.bytes;
    std::byte* slot = site.slot(one.staging);
    if (read)
      std::memset(slot, 0, kSlot);
    else
      fill(slot, one.content);
    one.request.token = ++token;
    one.request.urgency = read ? static_cast<Urgency>(dice() % 3) : Urgency::WRITE;
    one.place = one.request.place = place;
    one.request.address = reinterpret_cast<uint64_t>(slot);
    one.request.payload_bytes = one.content.bytes;
    one.request.identity = identity(one.content.number, one.content.generation);
    if (!read && dice() % 2 == 0) one.request.payload_crc = payload_crc(slot, one.content.bytes);
    one.request.stamp = kStamp;
    if (read && dice() % 3 == 0) {
      const auto owner = static_cast<uint16_t>(1 + dice() % kForeign.size());
      one.request.place = owned_by(owner, place);
      one.attached = attached.contains({owner, target_of(place)});
      one.foreign = one.foreign || owner != 1;
    }
    const LaneRoom room = engine.room();
    CHECK(room.reads == room.writes && room.reads + under.size() >= 64);
    if (!room.reads) return;
    engine.take(one.request);
    if (!read) stored.erase(place);
    free_staging.erase(one.staging);
    busy.insert(place);
    under.emplace(token, one);
  }

  void take(const LaneEnd& completion) {
    const auto found = under.find(completion.token);
    CHECK(found != under.end());
    const Under& one = found->second;
    const bool read = one.request.is_read();
    if (completion.code == Outcome::OK) {
      ++ok;
      CHECK(!one.foreign && one.attached);
      if (read)
        CHECK(holds(site.slot(one.staging), one.content));
      else
        stored[one.place] = one.content;
    } else if (completion.code == Outcome::STALE) {
      CHECK(one.foreign && one.attached);
      ++stale;
    } else if (completion.code == Outcome::IO_ERROR) {
      CHECK(completion.error == EBADF && !one.attached);
      ++without_files;
    } else {
      CHECK(completion.code == Outcome::CANCELLED && (!one.wanted || closing));
      ++late;
    }
    release(found);
  }

  void release(std::map<uint64_t, Under>::iterator one) {
    free_staging.insert(one->second.staging);
    busy.erase(one->second.place);
    under.erase(one);
  }

  // Cancel one of the last four operations.
  void give_up() {
    const auto found = under.find(token - dice() % 4);
    if (found == under.end()) return;
    if (!engine.cancel_one(found->first)) {
      found->second.wanted = false;
      return;
    }
    ++withdrawn;
    release(found);
  }

  // Attach or detach an engine's files while reads of the previous files run.
  void change_files() {
    const auto owner = static_cast<uint16_t>(1 + dice() % kForeign.size());
    const size_t target = dice() % kTargets;
    if (dice() % 3) {
      engine.target(target).attach(owner, {site.targets[target].slab_fd, kForeign[owner - 1u]});
      attached.insert({owner, target});
    } else {
      engine.target(target).detach(owner);
      attached.erase({owner, target});
    }
  }

  void run(unsigned rounds) {
    for (unsigned round = 0; round < rounds; ++round) {
      for (uint64_t count = dice() % 6; count > 0; --count) submit_one();
      engine.start();
      for (uint64_t count = dice() % 4; count > 2; --count) give_up();
      if (dice() % 64 == 0) {  // while operations run on the old descriptors
        const size_t index = dice() % kTargets;
        engine.target(index).replace(site.reopened(index));
      }
      if (dice() % 16 == 0) change_files();
      if (dice() % 16 == 0) engine.target(dice() % kTargets).note({.kind = LogKind::RESET});
      pollfd readable{engine.fd(), POLLIN, 0};
      if (dice() % 2 == 0) poll(&readable, 1, 1);
      for (const LaneEnd& one : engine.poll()) take(one);
    }
    while (!under.empty())
      for (const LaneEnd& one : wait(engine)) take(one);
  }
};

// An ordinary user's limit of locked memory applies to the rings of all processes, and the kernel
// returns the memory of a closed ring after a delay.
Engine opened(const EngineSetup& setup) {
  for (int tries = 1;; ++tries) {
    try {
      return Engine(setup);
    } catch (const RingError& error) {
      if (error.code().value() != ENOMEM || tries == 300) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

// The seed chooses rings with registered memory, rings without, or threads.
void test_mix(const std::string& directory, uint64_t seed, unsigned rounds) {
  Site site(directory);
  Engine engine = opened(site.setup(seed % 3 == 0, nullptr, seed % 3 == 2 ? 4 : 0));
  Mixer mixer(site, engine, seed);
  mixer.run(rounds);
  // Rounds do not wait, so nearly all rounds may pass while a shared disk stalls.
  for (int again = 0; again < 20 && mixer.ok <= rounds / 4; ++again) mixer.run(rounds);
  CHECK(mixer.ok > rounds / 4);
  CHECK(mixer.stale > 0 && mixer.without_files > 0);
  CHECK(engine.close(std::chrono::seconds(20)));
  std::map<LogKind, uint64_t> kinds;
  for (unsigned target = 0; target < kTargets; ++target)
    CHECK(check_log(site.targets[target].log_fd, kinds) >= 2 * kLogPages);
  CHECK(kinds[LogKind::PUT] > 0 && kinds[LogKind::RESET] > 0);
  std::printf("seed %lu: %lu ok, %lu given up, %lu taken back, %lu stale, %lu without files\n",
              seed, mixer.ok, mixer.late, mixer.withdrawn, mixer.stale, mixer.without_files);
}

void test_close_under_load(const std::string& directory, uint64_t seed) {
  Site site(directory);
  auto gate = std::make_shared<StartGate>();
  Engine engine = opened(site.setup(true, gate, seed % 2 ? 4 : 0));
  Mixer mixer(site, engine, seed);
  gate->shut({1, 2, 3});
  for (int i = 0; i < 60; ++i) mixer.submit_one();
  engine.start();
  while (!engine.close(std::chrono::milliseconds(1))) {
    gate->shut({});
    engine.start();
  }
  mixer.closing = true;
  for (const LaneEnd& one : engine.poll()) mixer.take(one);
  CHECK(mixer.under.empty());
}

void test_an_engine_that_cannot_start(const std::string& directory) {
  Site site(directory);
  EngineSetup broken = site.setup(true);
  broken.targets[1].slab_fd = 9999;
  try {
    Engine never(broken);
    CHECK(false);
  } catch (const RingError& error) {
    CHECK(error.code().value() == EBADF);
  }
}

// Check that reads beyond the bound wait for those before them, but not for a cancelled one.
void test_reads_that_wait(const std::string& directory) {
  Site site(directory);
  auto gate = std::make_shared<StartGate>();
  EngineSetup setup = site.setup(true, gate);
  setup.limits.read_bytes_started_max = 2 * kSlot;
  Engine engine = opened(setup);
  LaneOp request;
  request.payload_bytes = kPayload;
  request.identity = identity(1, 1);
  const auto submit = [&](uint64_t number, Urgency urgency) {
    request.token = number + 1;
    request.urgency = urgency;
    request.place = place_of(0, static_cast<uint32_t>(number));
    request.address = site.address(static_cast<unsigned>(number));
    engine.take(request);
  };
  constexpr size_t kReads = 6;
  for (uint64_t number = 0; number < kReads; ++number) {
    fill(site.slot(static_cast<unsigned>(number)), {1, 1});
    submit(number, Urgency::WRITE);
  }
  engine.start();
  size_t ended = 0;
  while (ended < kReads) ended += wait(engine).size();
  gate->shut({place_of(0, 0), place_of(0, 1)});
  for (uint64_t number = 0; number < kReads; ++number) submit(number, Urgency::DEMAND);
  engine.start();
  const auto starts = [&] { return gate->starts().size() - kReads; };
  while (starts() < 2) std::this_thread::yield();
  CHECK(engine.cancel_one(kReads));  // the last read, which has not started
  CHECK(starts() == 2);
  CHECK(!engine.cancel_one(1));
  std::set<uint64_t> right;
  while (right.size() < 3)
    for (const LaneEnd& one : wait(engine))
      CHECK(one.code == Outcome::OK && right.insert(one.token).second);
  CHECK((right == std::set<uint64_t>{3, 4, 5}));
  CHECK(starts() == 5);
  gate->shut({});
  engine.start();
  while (right.size() < 5)
    for (const LaneEnd& one : wait(engine))
      CHECK(one.code == (one.token == 1 ? Outcome::CANCELLED : Outcome::OK) &&
            right.insert(one.token).second);
  CHECK(engine.close(std::chrono::seconds(20)));
}

// Check the checksums computed ahead of writes while some payloads are dropped.
void test_checksums(uint64_t seed) {
  std::mt19937_64 dice(seed);
  std::vector<std::byte> payload(1 << 20);
  for (auto& one : payload) one = static_cast<std::byte>(dice());
  auto completions = std::make_shared<CompletionQueue>();
  Checksums checksums(completions, {});
  std::map<uint64_t, std::pair<size_t, size_t>> wanted;
  std::vector<Summed> found;
  for (uint64_t number = 1; number <= 200; ++number) {
    const size_t at = dice() % payload.size();
    const size_t bytes = dice() % (payload.size() - at) + 1;
    wanted[number] = {at, bytes};
    checksums.add(number, payload.data() + at, bytes);
    if (dice() % 4) continue;
    const uint64_t dropped = dice() % number + 1;
    checksums.forget(dropped);
    checksums.take(found);
    if (std::ranges::none_of(found, [&](const Summed& one) { return one.number == dropped; }))
      wanted.erase(dropped);
  }
  while (found.size() < wanted.size()) {
    pollfd ready{completions->fd(), POLLIN, 0};
    CHECK(poll(&ready, 1, 10'000) == 1);
    CHECK(completions->take().empty());
    checksums.take(found);
  }
  CHECK(std::ranges::is_sorted(found, {}, &Summed::number));
  for (const Summed& one : found) {
    const auto [at, bytes] = wanted.at(one.number);
    CHECK(one.crc == crc32c(payload.data() + at, bytes));
  }
  checksums.add(1, payload.data(), payload.size());
  checksums.stop();
}

// Check that a sleeping caller is woken once for several completions in quick succession.
void test_completions_that_follow() {
  CompletionQueue completions;
  const auto is_notified = [&] {
    pollfd ready{completions.fd(), POLLIN, 0};
    return poll(&ready, 1, 0) == 1;
  };
  completions.push({1, Outcome::OK, 0}, true);
  CHECK(!is_notified());
  completions.notify(false);
  CHECK(is_notified());
  CHECK(completions.take().size() == 1 && !is_notified());
  completions.push({2, Outcome::OK, 0}, true);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  completions.notify(true);  // more follow, but this one has waited long enough
  CHECK(is_notified());
  CHECK(completions.take().size() == 1);
  completions.push({3, Outcome::OK, 0}, true);
  completions.push({4, Outcome::OK, 0});  // no more follow
  CHECK(is_notified());
  CHECK(completions.take().size() == 2 && !is_notified());
  completions.push({5, Outcome::OK, 0}, true);
  completions.landed({6});
  CHECK(is_notified());
}

}  // namespace

// Return how many of kReads reads end before a write that was submitted after them.
size_t reads_before_a_write() {
  constexpr size_t kReads = 5'000;
  const int fd = memfd_create("slab", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, kPageBytes) == 0);
  std::vector<std::byte> memory((kReads + 1) * kPageBytes);
  std::vector<int> tags(kReads + 1);
  ThreadRing ring(2, {});
  for (size_t at = 0; at < kReads; ++at)
    ring.prepare(true, fd, memory.data() + at * kPageBytes, kPageBytes, 0, &tags[at]);
  ring.prepare(false, fd, memory.data() + kReads * kPageBytes, kPageBytes, 0, &tags[kReads]);
  size_t ended = 0, before = kReads;
  while (ended <= kReads) {
    ring.enter(kForever);
    ring.reap([&](void* tag, int result) {
      CHECK(result == static_cast<int>(kPageBytes));
      if (tag == &tags[kReads]) before = ended;
      ++ended;
    });
  }
  close(fd);
  return before;
}

// Check that a write may overtake reads. A busy machine may stop the writing thread for the
// duration of all reads, but not in every try.
void test_a_write_beside_many_reads() {
  bool is_early = false;
  for (int tries = 0; tries < 50 && !is_early; ++tries) is_early = reads_before_a_write() < 2'500;
  CHECK(is_early);
}

// -- CUDA calls, on functions that record them. An event is a number; 0 is none.

std::vector<size_t> batches;
std::vector<uint64_t> launched;
std::atomic<size_t> recorded{0}, reached{0};  // events recorded, and those that the GPU has reached

CudaFunctions cuda_functions() {
  CudaFunctions cuda;
  cuda.copy_batch = [](uint64_t*, uint64_t*, size_t* sizes, size_t number, void*, size_t*, size_t,
                       size_t* failed, CudaHandle) {
    for (*failed = 0; *failed < number; ++*failed)
      if (!sizes[*failed]) return 1;
    batches.push_back(number);
    return 0;
  };
  cuda.launch = [](CudaHandle, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned, CudaHandle, void** arguments, void**) {
    launched.insert(launched.end(), {blocks, threads, *static_cast<uint64_t*>(arguments[0]),
                                     *static_cast<uint64_t*>(arguments[1])});
    return 0;
  };
  cuda.record = [](CudaHandle, CudaHandle) { return ++recorded, 0; };
  cuda.synchronize = [](CudaHandle event) {
    while (reached < reinterpret_cast<size_t>(event)) std::this_thread::yield();
    return 0;
  };
  cuda.set_context = [](CudaHandle) { return 0; };
  cuda.exchange_capture_mode = [](int* mode) { return *mode == 2 ? 0 : 1; };
  return cuda;
}

void test_calls_of_copies() {
  const CudaFunctions cuda = cuda_functions();
  std::vector<uint64_t> addresses(10'000), sizes(10'000, 8);
  const CopyColumns all{addresses.data(), addresses.data(), sizes.data()};
  const CudaEnd end{reinterpret_cast<CudaHandle>(1), nullptr};
  CHECK(!submit_copies(cuda, all, sizes.size(), nullptr, nullptr, end).call && recorded == 1);
  CHECK((batches == std::vector<size_t>{16, 64, 256, 1024, 4096, 4096, 448}));
  sizes[100] = 0;
  const CudaFailure failed = submit_copies(cuda, all, sizes.size(), nullptr, nullptr, end);
  CHECK(failed.call && failed.status == 1 && failed.at == 100 && recorded == 1);
  std::vector<uint64_t> rows{7, 1, 2,
                             8, 3, 4};  // the number of blocks and two arguments of each launch
  CHECK(!submit_launches(cuda, nullptr, 32, rows, 3, nullptr, {}).call && recorded == 1);
  CHECK((launched == std::vector<uint64_t>{7, 32, 1, 2, 8, 32, 3, 4}));
}

void test_a_waiter_of_events() {
  const CudaFunctions cuda = cuda_functions();
  const int fd = eventfd(0, EFD_CLOEXEC);
  CHECK(fd >= 0);
  eventfd_t signalled = 0;
  EventWaiter waiter(cuda, fd, "waiter");
  for (size_t event = 1; event <= 3; ++event)
    CHECK(!record_end(cuda, nullptr, {reinterpret_cast<CudaHandle>(event), &waiter}).call);
  CHECK(waiter.newest() == 3 && waiter.is_over(0) && !waiter.is_over(1));
  reached = 1;
  CHECK(eventfd_read(fd, &signalled) == 0 && signalled == 1);
  CHECK(waiter.is_over(1) && !waiter.is_over(2));
  reached = 3;
  waiter.close();  // returns after the last event
  CHECK(eventfd_read(fd, &signalled) == 0 && signalled == 2 && waiter.is_over(3));
  EventWaiter(cuda, fd, "idle").close();
  close(fd);
}

int main(int count, char** words) {
  CHECK(count == 4);  // directory, first seed, seeds
  const std::string directory = words[1];
  const uint64_t first = std::strtoull(words[2], nullptr, 10);
  const uint64_t seeds = std::strtoull(words[3], nullptr, 10);
  test_crc_of_parts(first);
  test_join_crcs(first);
  test_an_engine_that_cannot_start(directory);
  test_reads_that_wait(directory);
  test_checksums(first);
  test_completions_that_follow();
  test_a_write_beside_many_reads();
  test_calls_of_copies();
  test_a_waiter_of_events();
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    test_mix(directory, seed, 2'000);
    test_close_under_load(directory, seed);
  }
  return 0;
}
