// What both fake libraries share: a log of calls, objects that are known while they live, and what
// a test may ask for through ctypes (the functions fake_*).
//
// Everything here is in an unnamed namespace: two libraries in one process must not share it.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Object {
  std::string kind;
  int number = 0;  // of its kind and since the library was loaded
  bool alive = true;
  bool used = false;  // by a product
  std::map<std::string, std::int64_t> values;
  std::map<std::string, Object*> parts;

  std::string name() const { return kind + std::to_string(number); }
};

struct Planned {
  std::string call;
  int skip;
  int status;
  int milliseconds;
};

struct State {
  std::mutex mutex;
  std::string log, answer;
  std::vector<Planned> planned;
  std::map<std::string, std::int64_t> settings;
  std::map<std::string, int> made;
  std::map<std::thread::id, int> threads;
  std::map<const void*, Object*> objects;  // by address; those that died stay, to be recognized
};

State& state() {
  static auto* const one = new State;  // never destroyed: extensions may call at exit
  return *one;
}

std::int64_t Setting(const char* name, std::int64_t otherwise) {
  const auto found = state().settings.find(name);
  return found == state().settings.end() ? otherwise : found->second;
}

// One call: a line of the log, `name key=value ...`.  Holds the lock while the library works.
class Call {
 public:
  explicit Call(const char* name) : name_(name), line_(name) {
    int milliseconds = 0;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      auto& planned = state().planned;
      for (auto at = planned.begin(); at != planned.end();) {
        if (at->call != name || at->skip-- > 0) {
          ++at;
          continue;
        }
        if (at->status != 0) failure_ = at->status;
        milliseconds += at->milliseconds;
        at = planned.erase(at);
      }
    }
    if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    lock_ = std::unique_lock<std::mutex>(state().mutex);
  }
  ~Call() { state().log += line_ + '\n' + complaints_; }

  // The status that a test has planned for this call, or 0.
  int failure() {
    if (failure_ != 0) Note("failed", failure_);
    return failure_;
  }

  void Note(const char* key, std::int64_t value) { Word(key, std::to_string(value)); }
  void Note(const char* key, const void* address) {
    Note(key, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address)));
  }
  void Word(const char* key, const std::string& word) {
    line_ += std::string(" ") + key + '=' + word;
  }

  // Which thread this is: 1 is the first that was noted.
  void NoteThread() {
    auto& threads = state().threads;
    Note("thread", threads.emplace(std::this_thread::get_id(), threads.size() + 1).first->second);
  }

  // Of what the real library would crash at or answer wrongly; tests want none.
  void Complain(const std::string& what) {
    complaints_ += "COMPLAINT " + name_ + ": " + what + '\n';
  }

  Object* Make(const void* address, const char* kind) {
    auto& known = state().objects[address];
    if (known != nullptr && known->alive && known->kind != "product") {
      Complain(known->name() + " is made again before it was destroyed");
    }
    known = new Object;  // never freed: the log and other objects may speak of it
    known->kind = kind;
    known->number = ++state().made[kind];
    Word(kind, known->name());
    return known;
  }

  // The living object of this kind at `address`, or null and a complaint.
  Object* Use(const char* key, const void* address, const std::string& kind) {
    const auto found = state().objects.find(address);
    if (found == state().objects.end() || found->second->kind != kind) {
      Complain(std::string(key) + " is no " + kind + " that was made");
      return nullptr;
    }
    Word(key, found->second->name());
    if (!found->second->alive) Complain(found->second->name() + " was destroyed");
    return found->second;
  }

  Object* Destroy(const void* address, const std::string& kind) {
    Object* const object = Use(kind.c_str(), address, kind);
    if (object == nullptr) return nullptr;
    object->alive = false;
    for (const auto& other : state().objects) {
      for (const auto& part : other.second->parts) {
        if (part.second == object && other.second->alive && !Undestroyable(*other.second)) {
          Complain(object->name() + " is destroyed before " + other.second->name());
        }
      }
    }
    CheckParts(*object);
    return object;
  }

  // cuSPARSELt has no destructor of products, and crashes at that of an unused structured matrix.
  static bool Undestroyable(const Object& object) {
    return object.kind == "product" || (object.values.count("structured") != 0 && !object.used);
  }

  void CheckParts(const Object& object) {
    for (const auto& part : object.parts) {
      if (!part.second->alive) Complain(part.second->name() + " of " + object.name() + " is gone");
    }
  }

 private:
  std::string name_, line_, complaints_;
  int failure_ = 0;
  std::unique_lock<std::mutex> lock_;
};

// The rows and columns of op(matrix).
struct Sides {
  std::int64_t rows, cols;
};

Sides SidesOf(const Object& matrix, bool transposed) {
  const auto rows = matrix.values.at("rows"), cols = matrix.values.at("cols");
  return transposed ? Sides{cols, rows} : Sides{rows, cols};
}

// D = op(A) op(B) with an order that the leading dimension of each fits.
void CheckProduct(Call* call, const Object& a, bool a_transposed, const Object& b,
                  bool b_transposed, const Object& d, std::int64_t column_order) {
  const Sides left = SidesOf(a, a_transposed), right = SidesOf(b, b_transposed);
  const Sides out = SidesOf(d, false);
  if (left.cols != right.rows || left.rows != out.rows || right.cols != out.cols) {
    call->Complain("the shapes do not fit");
  }
  for (const Object* matrix : {&a, &b, &d}) {
    const bool columns = matrix->values.at("order") == column_order;
    if (matrix->values.at("ld") < matrix->values.at(columns ? "rows" : "cols")) {
      call->Complain("the leading dimension of " + matrix->name() + " is too small");
    }
  }
}

// A value of so many bytes, which must be what the attribute takes.
std::int64_t Value(Call* call, const void* value, std::size_t bytes, std::size_t expected) {
  std::int64_t found = 0;
  if (bytes != expected) {
    call->Complain("the attribute has " + std::to_string(expected) + " bytes");
  }
  std::memcpy(&found, value, bytes < 8 ? bytes : 8);  // little-endian, and nothing negative
  return found;
}

std::string Words(int status) { return "fake words of status " + std::to_string(status); }

}  // namespace

extern "C" {

// The calls since the last time that it was asked, one a line.
const char* fake_log() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().answer.swap(state().log);
  state().log.clear();
  return state().answer.c_str();
}

// The names of objects that live, but for those of which the library has no destructor.
const char* fake_alive() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().answer.clear();
  for (const auto& object : state().objects) {
    if (object.second->alive && object.second->kind != "product") {
      state().answer += object.second->name() + ' ';
    }
  }
  return state().answer.c_str();
}

// The call of `name` after `skip` more of them takes so long, and fails unless `status` is 0.
void fake_plan(const char* name, int skip, int status, int milliseconds) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().planned.push_back({name, skip, status, milliseconds});
}

// How many planned calls have not come.
int fake_planned() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().planned.size());
}

void fake_set(const char* name, std::int64_t value) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().settings[name] = value;
}

// Forgets the log, the plans, the settings, and all objects.
void fake_forget() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log.clear();
  state().planned.clear();
  state().settings.clear();
  state().made.clear();
  state().threads.clear();
  state().objects.clear();
}

}  // extern "C"
