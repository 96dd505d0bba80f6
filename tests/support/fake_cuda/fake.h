// A library that computes nothing: each call is a line of a log, `name key=value ...`.
//
// Everything here is in an unnamed namespace, as two libraries in one process must not share it.

#pragma once

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "cuda_runtime_api.h"

namespace {

struct State {
  std::mutex mutex;
  std::string log, answer;
  std::map<std::string, Int> settings;
  std::set<Int> alive, dead;  // objects, by address
};
State& state = *new State;  // never destroyed: extensions may call at exit

class Call {
 public:
  Call(const char* name, const char* keys)
      : lock_(state.mutex), name_(name), line_(name), keys_(keys) {
    std::this_thread::sleep_for(std::chrono::milliseconds(Setting(name_ + " sleeps")));
    const auto fails = state.settings.find(name_ + " fails");  // after so many other calls
    failed_ = fails != state.settings.end() && fails->second-- == 0;
    if (failed_) line_ += " failed=1";
  }
  ~Call() { state.log += line_ + '\n'; }

  bool failed() const { return failed_; }
  Int Setting(const std::string& key) { return state.settings[key]; }

  // These log an argument under the next key, or answer it by a setting.
  void Note(int* answer) { *answer = static_cast<int>(Setting(NextKey())); }
  void Note(Size* answer) { *answer = static_cast<Size>(Setting(NextKey())); }
  void Note(void** made) { Note(static_cast<In>(*made = new char[16])); }
  void Note(Int number) {
    const std::string key = NextKey();
    if (key == "bytes" && value_ != nullptr) {
      Int value = 0;
      std::memcpy(&value, value_, static_cast<Size>(number));
      Word("value", value);
    }
    Word(key, number);
  }
  void Note(In pointer) {
    const std::string key = NextKey();
    const auto address = static_cast<Int>(reinterpret_cast<std::uintptr_t>(pointer));
    if (key == "value") {
      value_ = pointer;
    } else if ((key == "alpha" || key == "beta") && address >= 1 << 16) {
      std::int32_t bits;  // on the host: tests use lower addresses for those on the device
      std::memcpy(&bits, pointer, sizeof(bits));
      Word(key + "_bits", bits);
    } else {
      Word(key, address);
    }
    if (key == "made") {
      state.alive.insert(address);
      state.dead.erase(address);
    } else if (key == "gone") {
      if (state.alive.erase(address) == 0) line_ += " WRONG=destroyed_what_does_not_live";
      state.dead.insert(address);
    } else if (state.dead.count(address) != 0) {
      line_ += " WRONG=used_after_destruction";
    }
  }

 private:
  std::string NextKey() {  // the name in such as `*streams` and `algorithm->data[1]`
    std::string key;
    std::getline(keys_ >> std::ws, key, ',');
    return key.substr(key[0] == '*', key.find('-'));
  }

  void Word(const std::string& key, Int value) { line_ += ' ' + key + '=' + std::to_string(value); }

  std::lock_guard<std::mutex> lock_;
  std::string name_, line_;
  std::istringstream keys_;
  In value_ = nullptr;
  bool failed_ = false;
};

template <typename Status, typename... Arguments>
Status Called(Status failure, const char* name, const char* keys, Arguments... arguments) {
  Call call(name, keys);
  if (call.failed()) return failure;
  (call.Note(arguments), ...);
  return Status{};
}

}  // namespace

extern "C" {

// The calls since the last time that it was asked.
const char* fake_log() {
  std::lock_guard<std::mutex> lock(state.mutex);
  state.answer.swap(state.log);
  state.log.clear();
  return state.answer.c_str();
}

int fake_alive() { return static_cast<int>(state.alive.size()); }

void fake_set(const char* key, Int value) { state.settings[key] = value; }

void fake_forget() {
  for (auto* objects : {&state.alive, &state.dead}) objects->clear();
  state.settings.clear();
  state.log.clear();
}

}  // extern "C"
