// Binds a struct of parameters from a list of its fields: each field is written once, and is an
// argument of the Python function.
//
//   bind_op(m, "softcap", softcap, "csrc/kernels/layer/softcap.h",
//           field("x", &SoftcapParams::x), option("cap", &SoftcapParams::cap));
//
// A field is required. If an option is not given, it has the value of the third argument, or else
// the struct's default. Fields are stored in the order of the list, so a field may read those
// before it. Fields after py::kw_only() are keywords.
//
// A Tensor or a pointer is an Array in Python, or None. A struct is the class that bind_params made
// of it. The list is read at run time: a template for each op takes twice as long to compile.
#pragma once

#include <functional>
#include <type_traits>
#include <utility>

#include "kernels/bind_ops.h"

// Hidden, like pybind11's types.
namespace [[gnu::visibility("hidden")]] cpmcu {

using Arrays = std::vector<SharedArray>;

struct Field {
  const char* name = nullptr;  // null: the fields after this one are keyword arguments
  bool is_required = true;
  pybind11::object initial{};  // default of an optional argument; empty: the default of the struct
  size_t offset = 0;           // offset of `at` from the start of the struct, in bytes
  // Stores what Python passed, and keeps its arrays.
  std::function<void(void* at, pybind11::handle passed, Arrays& kept)> set{};
};

// Fields of P.
template <typename P>
struct Fields {
  std::vector<Field> list;
};

// ---- one field

template <typename T>
void store(T& to, pybind11::handle passed, Arrays& kept) {
  if constexpr (std::is_same_v<T, Tensor> || std::is_pointer_v<T>) {
    kept.push_back(passed.cast<SharedArray>());
    if constexpr (std::is_pointer_v<T>) {
      to = pointer_to<std::remove_cv_t<std::remove_pointer_t<T>>>(kept.back());
    } else {
      to = tensor_of(kept.back());
    }
  } else if constexpr (std::is_enum_v<T>) {
    to = static_cast<T>(passed.cast<int>());
  } else if constexpr (std::is_class_v<T>) {
    const auto& params = passed.cast<const OpsParams<T>&>();
    to = params.params;
    kept.insert(kept.end(), params.arrays.begin(), params.arrays.end());
  } else {
    to = passed.cast<T>();
  }
}

template <typename T>
void store_at(void* at, pybind11::handle passed, Arrays& kept) {
  store(*static_cast<T*>(at), passed, kept);
}
template <typename P, typename T>
size_t offset_of(T P::* member) {
  const P params{};
  return reinterpret_cast<const char*>(&(params.*member)) - reinterpret_cast<const char*>(&params);
}

template <typename P, typename T>
Fields<P> field(const char* name, T P::* member) {
  return {{{.name = name, .offset = offset_of(member), .set = store_at<T>}}};
}
// A field that is not one member: set(params, passed) stores a Passed.
template <typename P, typename Passed, typename Set>
Fields<P> field_of(const char* name, Set set) {
  const auto store = [set](void* at, pybind11::handle passed, Arrays& kept) {
    const auto value = passed.cast<Passed>();
    if constexpr (std::is_same_v<Passed, SharedArray>) kept.push_back(value);
    set(*static_cast<P*>(at), value);
  };
  return {{{.name = name, .set = store}}};
}
// An array, whose dimensions `first`, `first` + 1, ... are stored in `sizes`.
template <typename P, typename T, typename... Sizes>
Fields<P> shaped(const char* name, T P::* member, int first, Sizes P::*... sizes) {
  return field_of<P, SharedArray>(name, [=](P& p, const SharedArray& passed) {
    p.*member = pointer_to<std::remove_cv_t<std::remove_pointer_t<T>>>(passed);
    if (!passed) return;
    int dim = first;
    ((p.*sizes = static_cast<Sizes>(passed->tensor().size(dim++))), ...);
  });
}

template <typename P>
Fields<P> optional(Fields<P> fields, const pybind11::object& initial = {}) {
  for (Field& field : fields.list) field.is_required = false, field.initial = initial;
  return fields;
}
template <typename P, typename T>
Fields<P> option(const char* name, T P::* member) {
  return optional(field(name, member));
}
template <typename P, typename T>
Fields<P> option(const char* name, T P::* member, std::type_identity_t<T> initial) {
  return optional(field(name, member), pybind11::cast(initial));
}
// The first `width` columns of the matrix `member` are the output; 0: all.
template <typename P>
Fields<P> width(const char* name, Tensor P::* member, int64_t P::* stride) {
  return optional(field_of<P, int64_t>(name, [=](P& p, int64_t columns) {
    const Tensor whole = p.*member;
    if (columns == 0) return;
    p.*member = Tensor(whole.data(), whole.dtype(), {whole.size(0), columns});
    p.*stride = whole.size(1);
  }));
}

// ---- lists of fields

template <typename P>
void append(Fields<P>& to, const Fields<P>& fields) {
  to.list.insert(to.list.end(), fields.list.begin(), fields.list.end());
}
template <typename P>
void append(Fields<P>& to, pybind11::kw_only) {
  to.list.emplace_back();
}
template <typename P, typename... Items>
Fields<P> fields_of(const Items&... items) {
  Fields<P> all;
  (append(all, items), ...);
  return all;
}
// Fields of a struct within the struct.
template <typename P, typename Inner, typename... Items>
Fields<P> within(Inner P::* inner, const Items&... items) {
  Fields<P> all{fields_of<Inner>(items...).list};
  for (Field& field : all.list) field.offset += offset_of(inner);
  return all;
}

// ---- binding (bind_ops.cpp)

// Stores all arguments of a call of `name`.
void store_arguments(const std::string& name, const std::vector<Field>& fields, void* params,
                     const pybind11::args& args, const pybind11::kwargs& kwargs, Arrays& kept);
// "name(ctx, x, *, cap=...)"
std::string signature_of(const std::string& name, const std::vector<Field>& fields);

// m.name(ctx, ...): fills the parameters of an op and runs it.
template <typename P, typename... Items>
void bind_op(pybind11::module_& m, const std::string& name, void (*op)(const Context&, const P&),
             const char* doc, const Items&... items) {
  const std::vector<Field> fields = fields_of<P>(items...).list;
  // One type of function for all ops, so pybind11's templates are instantiated once.
  const std::function<void(const OpsContext&, const pybind11::args&, const pybind11::kwargs&)>
      call = [=](const OpsContext& c, const pybind11::args& args, const pybind11::kwargs& kwargs) {
        P params{};
        Arrays kept;
        store_arguments(name, fields, &params, args, kwargs, kept);
        op(c.ctx, params);
      };
  pybind11::options options;
  options.disable_function_signatures();
  m.def(name.c_str(), call, (signature_of(name + "(ctx, ", fields) + "\n\n" + doc).c_str());
}

// Adds a constructor to a Python class of parameters. An object keeps its arrays alive.
// check(object) throws if the fields do not fit together.
template <typename P, typename Check, typename... Items>
void bind_init(pybind11::class_<OpsParams<P>>& made, Check check, const Items&... items) {
  const std::vector<Field> fields = fields_of<P>(items...).list;
  const std::string name = pybind11::str(made.attr("__name__"));
  pybind11::options options;
  options.disable_function_signatures();
  made.def(pybind11::init([=](const pybind11::args& args, const pybind11::kwargs& kwargs) {
             OpsParams<P> result;
             store_arguments(name, fields, &result.params, args, kwargs, result.arrays);
             check(result);
             return result;
           }),
           signature_of(name + "(", fields).c_str());
}

// A Python class of parameters. All arguments are keywords.
template <typename P, typename... Items>
void bind_params(pybind11::module_& m, const char* name, const char* doc, const Items&... items) {
  pybind11::class_<OpsParams<P>> made(m, name, doc);
  bind_init(made, [](const OpsParams<P>&) {}, pybind11::kw_only(), items...);
}

}  // namespace cpmcu
